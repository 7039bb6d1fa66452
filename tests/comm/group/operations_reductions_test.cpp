// all_reduce, reduce, reduce_scatter: every dtype, reduction, world size, count, kind of memory.
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "comm/group/matrix.h"
#include "comm/group/reference.h"

namespace maniple::harness {
namespace {

class Reductions : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, Reductions, testing::ValuesIn(every_place()), name_of);

struct Case {
  DType dtype;
  ReduceOp op;
  std::size_t count;
  Manner manner;
  int root = 0;

  std::string describe() const {
    return fmt::format("{} {} count {} root {} {}", maniple::to_string(dtype), maniple::to_string(op.kind()), count,
                       root, manner.describe());
  }
};

// Every dtype x reduction x count, in rotating manners.
template <class Visit>
void for_each_case(int ranks, Visit visit) {
  int number = 0;
  for (const DType dtype : kAllDTypes) {
    for (int kind = 0; kind < ReduceOp::kKindCount; ++kind) {
      if (!applies(static_cast<ReduceOp::Kind>(kind), dtype)) continue;
      const ReduceOp op = make_op(static_cast<ReduceOp::Kind>(kind), dtype);
      for (const std::size_t count : counts()) {
        const int turn = number++;
        visit(Case{dtype, op, count, Manner::of(turn), turn % ranks});
      }
    }
  }
}

void check_all_reduce(Rank& r, Arena& arena, const Case& c) {
  SCOPED_TRACE("all_reduce " + c.describe());
  const Pattern& input = input_of(c.dtype, c.op, r.rank);
  const Buffer in = arena.take(0, c.manner.memory, c.dtype, c.count);
  const Buffer out = c.manner.in_place ? in : arena.take(1, c.manner.memory, c.dtype, c.count);
  input.fill(in.data, c.count);
  if (c.manner.in_place) {
    r.world->all_reduce(in, c.op, c.manner.call()).synchronize();
  } else {
    r.world->all_reduce(in, out, c.op, c.manner.call()).synchronize();
    EXPECT_TRUE(input.matches(in.data, c.count)) << "the input was changed";
  }
  EXPECT_TRUE(result_of(c.dtype, c.op, r.size).matches(out.data, c.count));
  EXPECT_TRUE(arena.guards_intact());
}

TEST_P(Reductions, AllReduce) {
  run([](Rank& r) {
    Arena arena(r, largest_count() * 8);
    for_each_case(r.size, [&](const Case& c) { check_all_reduce(r, arena, c); });
  });
}

TEST_P(Reductions, AllReduceInEveryManner) {
  run([](Rank& r) {
    Arena arena(r, largest_count() * 8);
    for (const std::size_t count : counts()) {
      for (int number = 0; number < Manner::kAll; ++number) {
        check_all_reduce(r, arena, {DType::float32, ReduceOp::sum, count, Manner::exactly(number)});
      }
    }
  });
}

void check_reduce(Rank& r, Arena& arena, const Case& c) {
  SCOPED_TRACE("reduce " + c.describe());
  const Pattern& input = input_of(c.dtype, c.op, r.rank);
  const Buffer in = arena.take(0, c.manner.memory, c.dtype, c.count);
  const Buffer out = c.manner.in_place ? in : arena.take(1, c.manner.memory, c.dtype, c.count);
  input.fill(in.data, c.count);
  // Other ranks' outputs may be empty.
  const Buffer passed = r.rank == c.root ? out : Buffer{nullptr, 0, c.dtype};
  r.world->reduce(in, passed, c.root, c.op, c.manner.call()).synchronize();
  if (r.rank == c.root) {
    EXPECT_TRUE(result_of(c.dtype, c.op, r.size).matches(out.data, c.count));
  }
  if (r.rank != c.root || !c.manner.in_place) {
    EXPECT_TRUE(input.matches(in.data, c.count)) << "the input was changed";
  }
  EXPECT_TRUE(arena.guards_intact());
}

TEST_P(Reductions, Reduce) {
  run([](Rank& r) {
    Arena arena(r, largest_count() * 8);
    for_each_case(r.size, [&](const Case& c) { check_reduce(r, arena, c); });
    for (int root = 0; root < r.size; ++root) {
      check_reduce(r, arena, {DType::float32, ReduceOp::sum, 1000, Manner::exactly(root), root});
    }
  });
}

void check_reduce_scatter(Rank& r, Arena& arena, const Case& c) {
  SCOPED_TRACE("reduce_scatter " + c.describe());
  const Pattern& input = input_of(c.dtype, c.op, r.rank);
  const std::size_t total = c.count * r.size;
  const std::size_t offset = c.count * r.rank;
  const Buffer in = arena.take(0, c.manner.memory, c.dtype, total);
  input.fill(in.data, total);
  Buffer out{static_cast<std::byte*>(in.data) + offset * size_of(c.dtype), c.count, c.dtype, in.device};
  if (!c.manner.in_place) out = arena.take(1, c.manner.memory, c.dtype, c.count);
  r.world->reduce_scatter(in, out, c.op, {}, c.manner.call()).synchronize();
  EXPECT_TRUE(result_of(c.dtype, c.op, r.size).matches(out.data, c.count, offset));
  EXPECT_TRUE(arena.guards_intact());
  if (!c.manner.in_place) {
    EXPECT_TRUE(input.matches(in.data, total)) << "the input was changed";
  }
}

TEST_P(Reductions, ReduceScatter) {
  run([](Rank& r) {
    constexpr std::size_t kWhole = 1000;  // up to this many elements for each rank
    Arena arena(r, std::max(largest_count() / r.size + 1, kWhole) * 8 * r.size);
    for_each_case(r.size, [&](Case c) {
      if (c.count > kWhole) c.count = c.count / r.size + 1;  // the whole has about `count` elements
      check_reduce_scatter(r, arena, c);
    });
  });
}

TEST_P(Reductions, IntegersWrapAround) {
  run([](Rank& r) {
    std::vector<std::int8_t> small(300, 100);
    r.world->all_reduce(buffer_of(small));
    std::vector<std::int32_t> large(300, 0x40000001);
    r.world->all_reduce(buffer_of(large));
    for (const std::int8_t value : small) ASSERT_EQ(value, static_cast<std::int8_t>(100 * r.size));
    for (const std::int32_t value : large) ASSERT_EQ(value, static_cast<std::int32_t>(0x40000001LL * r.size));
  });
}

template <class T>
void check_nan_spreads(Rank& r) {
  for (const ReduceOp::Kind op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
    for (int culprit = 0; culprit < r.size; ++culprit) {
      std::vector<T> values(37, T(static_cast<float>(r.rank + 1)));
      if (r.rank == culprit) values[5] = T(std::numeric_limits<float>::quiet_NaN());
      r.world->all_reduce(buffer_of(values), op);
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(std::isnan(widen(values[i])), i == 5)
            << maniple::to_string(op) << " element " << i << " culprit " << culprit;
      }
    }
  }
}

TEST_P(Reductions, NanIsNeverLost) {
  run([](Rank& r) {
    check_nan_spreads<float>(r);
    check_nan_spreads<double>(r);
    check_nan_spreads<float16>(r);
    check_nan_spreads<bfloat16>(r);
  });
}

TEST_P(Reductions, Coalesced) {
  run([](Rank& r) {
    for (const bool async : {false, true}) {
      const RegisteredMemory registered = r.world->allocate(1000 * 8);
      std::vector<std::vector<std::byte>> memory;
      std::vector<Buffer> buffers;
      for (int i = 0; i < 60; ++i) {
        const DType dtype = kAllDTypes[i % kDTypeCount];
        const std::size_t count = i % 7 == 0    ? 0
                                  : i % 13 == 1 ? std::min<std::size_t>(largest_count(), 20011)
                                                : 3 * i + 1;
        memory.emplace_back(count * size_of(dtype) + 1);
        buffers.push_back({memory.back().data(), count, dtype});
      }
      buffers.push_back({registered.data(), 1000, DType::float64});
      for (const Buffer& buffer : buffers)
        input_of(buffer.dtype, ReduceOp::sum, r.rank).fill(buffer.data, buffer.count);
      if (async) {
        r.world->all_reduce_coalesced(buffers, ReduceOp::sum, {.async_op = true}).synchronize();
      } else {
        r.world->all_reduce_coalesced(buffers);
      }
      for (std::size_t i = 0; i < buffers.size(); ++i) {
        EXPECT_TRUE(result_of(buffers[i].dtype, ReduceOp::sum, r.size).matches(buffers[i].data, buffers[i].count)) << i;
      }
    }
    r.world->all_reduce_coalesced({});  // an empty list is allowed
  });
}

// Ranks with registered memory and ranks without it take part in the same call, below and above the size up to which
// bytes travel with the call.
TEST_P(Reductions, SomeRanksHaveRegisteredMemoryAndSomeHaveNot) {
  run([](Rank& r) {
    for (const std::size_t count : {500, 513, 1000, 2048, 2049, 5000}) {
      const RegisteredMemory registered = r.world->allocate(count * sizeof(float));
      std::vector<float> ordinary(count);
      const Pattern& input = input_of(DType::float32, ReduceOp::sum, r.rank);
      const Pattern& expected = result_of(DType::float32, ReduceOp::sum, r.size);
      for (int with = 0; with <= r.size; ++with) {  // the first `with` ranks use theirs
        for (const bool in_place : {true, false}) {
          void* const output = r.rank < with ? registered.data() : ordinary.data();
          std::vector<float> apart(count);
          void* const source = in_place ? output : apart.data();
          input.fill(source, count);
          r.world->all_reduce({source, count, DType::float32}, {output, count, DType::float32});
          EXPECT_TRUE(expected.matches(output, count))
              << count << " elements, " << with << " ranks, in place " << in_place;
        }
      }
    }
  });
}

class LargeReductions : public Operations {};
INSTANTIATE_TEST_SUITE_P(Some, LargeReductions, testing::ValuesIn(places({2, 3, 8})), name_of);

TEST_P(LargeReductions, AllReduce) {
  run([](Rank& r) {
    const std::size_t count = kSanitized ? 100'003 : 3'000'001;
    Arena arena(r, count * 4);
    for (const Memory memory : {Memory::ordinary, Memory::registered, Memory::mixed}) {
      check_all_reduce(r, arena, {DType::float32, ReduceOp::sum, count, {memory, true, false}});
      check_all_reduce(r, arena, {DType::bfloat16, ReduceOp::sum, count, {memory, false, true}});
    }
  });
}

}  // namespace
}  // namespace maniple::harness
