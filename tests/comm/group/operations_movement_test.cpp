// broadcast, gather, all_gather, scatter, all_to_all with equal parts; barrier.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include <fmt/format.h>

#include "comm/group/matrix.h"
#include "comm/group/pattern.h"

namespace maniple::harness {
namespace {

class Movement : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, Movement, testing::ValuesIn(every_place()), name_of);

struct Case {
  DType dtype;
  std::size_t count;  // of each part
  Manner manner;
  int root;
};

std::byte* element_at(const Buffer& buffer, std::size_t index) {
  return static_cast<std::byte*>(buffer.data) + index * size_of(buffer.dtype);
}

// Every dtype x count, in rotating manners and with rotating roots; then every manner for one dtype.
void for_each_case(Rank& r, const char* name, const std::function<void(const Case&)>& visit) {
  int number = 0;
  const auto run_case = [&](const Case& c) {
    SCOPED_TRACE(fmt::format("{} {} count {} root {} {}", name, maniple::to_string(c.dtype), c.count, c.root,
                             c.manner.describe()));
    visit(c);
  };
  for (std::size_t count : counts()) {
    if (count > 4099) count = count / r.size + 1;  // all parts together have about `count` elements
    for (const DType dtype : kAllDTypes) {
      run_case({dtype, count, Manner::of(number), number % r.size});
      ++number;
    }
    for (int manner = 0; manner < Manner::kAll; ++manner) {
      run_case({DType::float32, count, Manner::exactly(manner), manner % r.size});
    }
  }
}

std::size_t capacity(const Rank& r) {
  return std::max<std::size_t>(std::min<std::size_t>(4099, largest_count()) * r.size, largest_count() + r.size) * 8;
}

TEST_P(Movement, Broadcast) {
  run([](Rank& r) {
    Arena arena(r, largest_count() * 8);
    for_each_case(r, "broadcast", [&](const Case& c) {
      const Buffer buffer = arena.take(0, c.manner.memory, c.dtype, c.count);
      const Pattern& pattern = Pattern::noise(c.dtype, 100 + c.root);
      if (r.rank == c.root) pattern.fill(buffer.data, c.count);
      r.world->broadcast(buffer, c.root, c.manner.call()).synchronize();
      EXPECT_TRUE(pattern.matches(buffer.data, c.count));
      EXPECT_TRUE(arena.guards_intact());
    });
  });
}

// Fills this rank's input of a gather: its own part of `all` when in place.
Buffer gather_input(Rank& r, Arena& arena, const Case& c, const Buffer& all, bool in_place) {
  Buffer in{element_at(all, c.count * r.rank), c.count, c.dtype, all.device};
  if (!in_place) in = arena.take(0, c.manner.memory, c.dtype, c.count);
  Pattern::noise(c.dtype, r.rank).fill(in.data, c.count);
  return in;
}

void expect_gathered(Rank& r, const Case& c, const Buffer& all) {
  for (int rank = 0; rank < r.size; ++rank) {
    EXPECT_TRUE(Pattern::noise(c.dtype, rank).matches(element_at(all, c.count * rank), c.count))
        << "part of rank " << rank;
  }
}

TEST_P(Movement, Gather) {
  run([](Rank& r) {
    Arena arena(r, capacity(r));
    for_each_case(r, "gather", [&](const Case& c) {
      const bool root = r.rank == c.root;
      const Buffer all = arena.take(1, c.manner.memory, c.dtype, c.count * r.size);
      const Buffer in = gather_input(r, arena, c, all, c.manner.in_place && root);
      const Buffer out = root ? all : Buffer{nullptr, 0, c.dtype};
      r.world->gather(in, out, c.root, {}, c.manner.call()).synchronize();
      if (root) expect_gathered(r, c, all);
      EXPECT_TRUE(arena.guards_intact());
    });
  });
}

TEST_P(Movement, AllGather) {
  run([](Rank& r) {
    Arena arena(r, capacity(r));
    for_each_case(r, "all_gather", [&](const Case& c) {
      const Buffer out = arena.take(1, c.manner.memory, c.dtype, c.count * r.size);
      const Buffer in = gather_input(r, arena, c, out, c.manner.in_place);
      r.world->all_gather(in, out, {}, c.manner.call()).synchronize();
      expect_gathered(r, c, out);
      EXPECT_TRUE(arena.guards_intact());
    });
  });
}

TEST_P(Movement, Scatter) {
  run([](Rank& r) {
    Arena arena(r, capacity(r));
    for_each_case(r, "scatter", [&](const Case& c) {
      const bool root = r.rank == c.root;
      const Buffer all = arena.take(0, c.manner.memory, c.dtype, c.count * r.size);
      for (int rank = 0; root && rank < r.size; ++rank) {
        Pattern::noise(c.dtype, 50 + rank).fill(element_at(all, c.count * rank), c.count);
      }
      const bool in_place = root && c.manner.in_place;
      const Buffer out = in_place ? Buffer{element_at(all, c.count * r.rank), c.count, c.dtype, all.device}
                                  : arena.take(1, c.manner.memory, c.dtype, c.count);
      const ConstBuffer in = root ? ConstBuffer(all) : ConstBuffer{nullptr, 0, c.dtype};
      r.world->scatter(in, out, c.root, {}, c.manner.call()).synchronize();
      EXPECT_TRUE(Pattern::noise(c.dtype, 50 + r.rank).matches(out.data, c.count));
      EXPECT_TRUE(arena.guards_intact());
    });
  });
}

TEST_P(Movement, AllToAll) {
  run([](Rank& r) {
    Arena arena(r, capacity(r));
    for_each_case(r, "all_to_all", [&](const Case& c) {
      const Buffer in = arena.take(0, c.manner.memory, c.dtype, c.count * r.size);
      const Buffer out = arena.take(1, c.manner.memory, c.dtype, c.count * r.size);
      const auto sent = [&](int from, int to) -> const Pattern& {
        return Pattern::noise(c.dtype, 1000 + 64 * from + to);
      };
      for (int to = 0; to < r.size; ++to) sent(r.rank, to).fill(element_at(in, c.count * to), c.count);
      r.world->all_to_all(in, out, {}, {}, c.manner.call()).synchronize();
      for (int from = 0; from < r.size; ++from) {
        EXPECT_TRUE(sent(from, r.rank).matches(element_at(out, c.count * from), c.count)) << "part of rank " << from;
      }
      EXPECT_TRUE(arena.guards_intact());
    });
  });
}

// Ranks that only send go on, so some are operations ahead of others: of other sizes, with other roots, of a smaller
// group too. Each rank in turn is late.
TEST_P(Movement, RootedOperationsInARowWithALateRank) {
  if (!test_device().is_cpu()) return;  // they are made for host memory
  run([](Rank& r) {
    const int half = (r.size + 1) / 2;
    const auto group = r.world->split(r.rank < half ? 0 : 1, r.rank);
    constexpr std::size_t kLengths[] = {1, 3, 5, 40, 700, 2000, 30'000};
    std::vector<std::int32_t> in, out, all;
    const auto value = [](int round, int rank, std::size_t i) {
      return static_cast<std::int32_t>(static_cast<std::size_t>(round * 100 + rank * 7) + i % 90);
    };
    std::size_t wrong = 0;
    const int rounds = kSanitized || r.world->transport() == "tcp" ? 60 : 300;
    for (int round = 0; round < rounds; ++round) {
      ProcessGroup& now = round % 5 == 4 ? *group : *r.world;
      const int n = now.size(), me = now.rank(), root = round / 3 % n;
      const std::size_t count = kLengths[static_cast<std::size_t>(round) % std::size(kLengths)];
      const CallOptions call{.async_op = round % 11 == 10};
      if (round % 40 == 39 && round / 40 % r.size == r.rank) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));  // sleep: it is late
      }
      in.resize(count);
      for (std::size_t i = 0; i < count; ++i) in[i] = value(round, me, i);
      switch (round * 7 / 3 % 4) {
        case 0:
          now.broadcast(buffer_of(in), root, call).synchronize();
          for (std::size_t i = 0; i < count; ++i) wrong += in[i] != value(round, root, i);
          break;
        case 1: {
          out.assign(count, -1);
          now.reduce(buffer_of(in), buffer_of(out), root, ReduceOp::max, call).synchronize();
          for (std::size_t i = 0; me == root && i < count; ++i) wrong += out[i] != value(round, n - 1, i);
          break;
        }
        case 2:
          all.assign(me == root ? count * static_cast<std::size_t>(n) : 0, -1);
          now.gather(buffer_of(in), buffer_of(all), root, {}, call).synchronize();
          for (std::size_t i = 0; i < all.size(); ++i)
            wrong += all[i] != value(round, static_cast<int>(i / count), i % count);
          break;
        default:
          all.resize(me == root ? count * static_cast<std::size_t>(n) : 0);
          for (std::size_t i = 0; i < all.size(); ++i) all[i] = value(round, static_cast<int>(i / count), i % count);
          now.scatter(buffer_of(all), buffer_of(in), root, {}, call).synchronize();
          std::fill(all.begin(), all.end(), -1);  // the memory is the caller's again
          for (std::size_t i = 0; i < count; ++i) wrong += in[i] != value(round, me, i);
      }
      std::fill(in.begin(), in.end(), -1);
    }
    EXPECT_EQ(wrong, 0u);
    r.world->barrier();
  });
}

TEST_P(Movement, BarrierHoldsUntilTheLastRankHasCome) {
  run([](Rank& r) {
    for (int round = 0; round < 3 * r.size; ++round) {
      // The late rank makes its mark before it enters; whoever has left the barrier must see the mark.
      const std::string mark = fmt::format("{}/mark{}", r.dir(), round);
      if (r.rank == round % r.size) {
        std::FILE* file = std::fopen(mark.c_str(), "w");
        ASSERT_NE(file, nullptr);
        std::fclose(file);
      }
      r.world->barrier({.async_op = round % 2 != 0}).synchronize();
      EXPECT_EQ(::access(mark.c_str(), F_OK), 0) << "round " << round;
    }
  });
}

TEST_P(Movement, TransportIsTheRequestedOne) {
  const Place place = GetParam();
  run([&](Rank& r) {
    EXPECT_EQ(r.world->size(), r.size);
    EXPECT_EQ(r.world->rank(), r.rank);
    EXPECT_EQ(r.world->name(), "world");
    EXPECT_EQ(r.world->backend(), chosen_backend());
    if ((with_plugin() || !test_device().is_cpu()) && r.size > 1) {
      EXPECT_NE(r.world->transport(), "none");
      return;
    }
    std::string_view expected = maniple::to_string(place.transport);
    if (r.size == 1) expected = "none";
    if (place.hosts > 1) expected = place.hosts == place.n ? "tcp" : "shm+tcp";
    EXPECT_EQ(r.world->transport(), expected);
  });
}

}  // namespace
}  // namespace maniple::harness
