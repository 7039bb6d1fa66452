// Parts of different lengths: gather, all_gather, scatter, reduce_scatter and all_to_all with counts.
#include <numeric>

#include <fmt/format.h>

#include "comm/group/matrix.h"
#include "comm/group/reference.h"

namespace maniple::harness {
namespace {

class Uneven : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, Uneven, testing::ValuesIn(every_place()), name_of);

// Lists of counts, the same on every rank: with empty parts, with one rank that has all, growing, all empty.
std::vector<std::vector<std::size_t>> count_lists(int ranks) {
  std::vector<std::vector<std::size_t>> lists(5);
  for (int rank = 0; rank < ranks; ++rank) {
    lists[0].push_back(rank % 2 == 0 ? 0 : 10 + rank);
    lists[1].push_back(rank == ranks - 1 ? 4099 : 0);
    lists[2].push_back(1 + 37 * rank);
    lists[3].push_back(0);
    lists[4].push_back(largest_count() / (rank + 2));
  }
  return lists;
}

std::vector<std::size_t> offsets(const std::vector<std::size_t>& counts) {
  std::vector<std::size_t> starts(counts.size() + 1);
  std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
  return starts;
}

std::byte* element_at(const Buffer& buffer, std::size_t index) {
  return static_cast<std::byte*>(buffer.data) + index * size_of(buffer.dtype);
}

struct Case {
  DType dtype;
  std::vector<std::size_t> counts;
  std::vector<std::size_t> starts;  // one more than ranks
  Manner manner;
  int root;

  std::size_t total() const { return starts.back(); }
};

void for_each_case(Rank& r, const std::function<void(Arena&, const Case&)>& visit) {
  const auto lists = count_lists(r.size);
  std::size_t most = 0;
  for (const auto& list : lists) most = std::max(most, offsets(list).back());
  Arena arena(r, most * 8);
  int number = 0;
  for (const auto& list : lists) {
    for (const DType dtype : {DType::int8, DType::float32, DType::float64, DType::bfloat16}) {
      const Case c{dtype, list, offsets(list), Manner::of(number), number % r.size};
      SCOPED_TRACE(fmt::format("case {}: {} total {} root {} {}", number, maniple::to_string(dtype), c.total(), c.root,
                               c.manner.describe()));
      visit(arena, c);
      EXPECT_TRUE(arena.guards_intact());
      ++number;
    }
  }
}

void expect_all_parts(const Case& c, const Buffer& all) {
  for (std::size_t rank = 0; rank < c.counts.size(); ++rank) {
    EXPECT_TRUE(
        Pattern::noise(c.dtype, static_cast<unsigned>(rank)).matches(element_at(all, c.starts[rank]), c.counts[rank]))
        << "part of rank " << rank;
  }
}

TEST_P(Uneven, Gather) {
  run([](Rank& r) {
    for_each_case(r, [&](Arena& arena, const Case& c) {
      const Buffer in = arena.take(0, c.manner.memory, c.dtype, c.counts[r.rank]);
      Pattern::noise(c.dtype, r.rank).fill(in.data, in.count);
      const bool root = r.rank == c.root;
      const Buffer out = root ? arena.take(1, c.manner.memory, c.dtype, c.total()) : Buffer{nullptr, 0, c.dtype};
      r.world->gather(in, out, c.root, c.counts, c.manner.call()).synchronize();
      if (root) expect_all_parts(c, out);
    });
  });
}

TEST_P(Uneven, AllGather) {
  run([](Rank& r) {
    for_each_case(r, [&](Arena& arena, const Case& c) {
      const Buffer out = arena.take(1, c.manner.memory, c.dtype, c.total());
      Buffer in{element_at(out, c.starts[r.rank]), c.counts[r.rank], c.dtype, out.device};
      if (!c.manner.in_place) in = arena.take(0, c.manner.memory, c.dtype, c.counts[r.rank]);
      Pattern::noise(c.dtype, r.rank).fill(in.data, in.count);
      r.world->all_gather(in, out, c.counts, c.manner.call()).synchronize();
      expect_all_parts(c, out);
    });
  });
}

TEST_P(Uneven, Scatter) {
  run([](Rank& r) {
    for_each_case(r, [&](Arena& arena, const Case& c) {
      const bool root = r.rank == c.root;
      const Buffer in = root ? arena.take(0, c.manner.memory, c.dtype, c.total()) : Buffer{nullptr, 0, c.dtype};
      for (int rank = 0; root && rank < r.size; ++rank) {
        Pattern::noise(c.dtype, rank).fill(element_at(in, c.starts[rank]), c.counts[rank]);
      }
      const Buffer out = arena.take(1, c.manner.memory, c.dtype, c.counts[r.rank]);
      r.world->scatter(in, out, c.root, c.counts, c.manner.call()).synchronize();
      EXPECT_TRUE(Pattern::noise(c.dtype, r.rank).matches(out.data, out.count));
    });
  });
}

TEST_P(Uneven, ReduceScatter) {
  run([](Rank& r) {
    for_each_case(r, [&](Arena& arena, const Case& c) {
      for (const ReduceOp::Kind op : {ReduceOp::sum, ReduceOp::max}) {
        const Buffer in = arena.take(0, c.manner.memory, c.dtype, c.total());
        input_of(c.dtype, op, r.rank).fill(in.data, in.count);
        Buffer out{element_at(in, c.starts[r.rank]), c.counts[r.rank], c.dtype, in.device};
        if (!c.manner.in_place) out = arena.take(1, c.manner.memory, c.dtype, c.counts[r.rank]);
        r.world->reduce_scatter(in, out, op, c.counts, c.manner.call()).synchronize();
        EXPECT_TRUE(result_of(c.dtype, op, r.size).matches(out.data, out.count, c.starts[r.rank]));
      }
    });
  });
}

// Rank a sends b + 1 elements more to b than to b - 1, and nothing along every third pair.
std::size_t exchanged(int from, int to, std::size_t scale) {
  return (from + 2 * to) % 3 == 0 ? 0 : scale * (from + 1) + to;
}

TEST_P(Uneven, AllToAll) {
  run([](Rank& r) {
    const std::size_t largest_scale = kSanitized ? 20 : 400;
    Arena arena(r, (largest_scale * (r.size + 1) + r.size) * r.size * 8);
    int number = 0;
    for (const std::size_t scale : {std::size_t{1}, largest_scale}) {
      for (const DType dtype : kAllDTypes) {
        const Manner manner = Manner::of(number++);
        SCOPED_TRACE(fmt::format("scale {} {} {}", scale, maniple::to_string(dtype), manner.describe()));
        std::vector<std::size_t> sends, receives;
        for (int other = 0; other < r.size; ++other) {
          sends.push_back(exchanged(r.rank, other, scale));
          receives.push_back(exchanged(other, r.rank, scale));
        }
        const auto in_starts = offsets(sends);
        const auto out_starts = offsets(receives);
        const Buffer in = arena.take(0, manner.memory, dtype, in_starts.back());
        const Buffer out = arena.take(1, manner.memory, dtype, out_starts.back());
        const auto sent = [&](int from, int to) -> const Pattern& {
          return Pattern::noise(dtype, 1000 + 64 * from + to);
        };
        for (int to = 0; to < r.size; ++to) sent(r.rank, to).fill(element_at(in, in_starts[to]), sends[to]);
        r.world->all_to_all(in, out, sends, receives, manner.call()).synchronize();
        for (int from = 0; from < r.size; ++from) {
          EXPECT_TRUE(sent(from, r.rank).matches(element_at(out, out_starts[from]), receives[from])) << "from " << from;
        }
        EXPECT_TRUE(arena.guards_intact());
      }
    }
  });
}

}  // namespace
}  // namespace maniple::harness
