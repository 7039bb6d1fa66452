// Ranks that call different things and do not meet: on several hosts, some operations start inside each host and others
// between all ranks; on one, ranks wait for a third one. All get a Mismatch soon.
#include <cstdlib>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "comm/group/matrix.h"
#include "fault/expect_error.h"

namespace maniple::harness {
namespace {

constexpr double kSoon = 6;  // seconds; the deadline is five times as long
const CallOptions kAsync{.async_op = true};

/// The memory of the calls in one group, until they end.
struct CallMemory {
  explicit CallMemory(int size) : one(48), in(48 * static_cast<std::size_t>(size)), out(in.size()), ints(48) {}
  std::vector<float> one, in, out;
  std::vector<std::int32_t> ints;
  std::optional<Work> earlier;  ///< of the first of two calls
};

struct Call {
  std::string text;  ///< part of what errors say of it
  std::function<Work(ProcessGroup&, CallMemory&)> start;
};

Call all_reduce_of(std::string text, ReduceOp op = ReduceOp::sum) {
  return {std::move(text), [op](auto& g, auto& m) { return g.all_reduce(buffer_of(m.one), op, kAsync); }};
}
Call reduce_to(int root) {
  return {"reduce #", [root](auto& g, auto& m) {
            return g.reduce(buffer_of(m.one), buffer_of(m.one), root, ReduceOp::sum, kAsync);
          }};
}
Call broadcast_from(int root) {
  return {"broadcast #", [root](auto& g, auto& m) { return g.broadcast(buffer_of(m.one), root, kAsync); }};
}
Call gather_to(int root) {
  return {"gather #",
          [root](auto& g, auto& m) { return g.gather(buffer_of(m.one), buffer_of(m.out), root, {}, kAsync); }};
}
Call scatter_from(int root) {
  return {"scatter #",
          [root](auto& g, auto& m) { return g.scatter(buffer_of(m.in), buffer_of(m.one), root, {}, kAsync); }};
}
Call barrier_call() {
  return {"barrier #", [](auto& g, auto&) { return g.barrier(kAsync); }};
}
Call all_gather_call() {
  return {"all_gather #",
          [](auto& g, auto& m) { return g.all_gather(buffer_of(m.one), buffer_of(m.out), {}, kAsync); }};
}
Call then(Call first, Call second) {
  return {first.text, [first = first.start, second = second.start](auto& g, auto& m) {
            const Work earlier = first(g, m);
            m.earlier = earlier;
            try {
              return second(g, m);
            } catch (const Aborted&) {
              return earlier;  // it has failed already, and says how
            }
          }};
}

std::vector<Call> operations() {
  return {
      all_reduce_of("all_reduce #"),
      reduce_to(0),
      broadcast_from(0),
      all_gather_call(),
      {"reduce_scatter #",
       [](auto& g, auto& m) { return g.reduce_scatter(buffer_of(m.in), buffer_of(m.one), ReduceOp::sum, {}, kAsync); }},
      barrier_call(),
      gather_to(0),
      scatter_from(0),
      {"all_to_all #",
       [](auto& g, auto& m) { return g.all_to_all(buffer_of(m.in), buffer_of(m.out), {}, {}, kAsync); }}};
}

/// What one rank calls, and what all others call.
struct Difference {
  Call odd, others;
};

std::vector<Difference> pairs_of_operations() {
  std::vector<Difference> pairs;
  for (const Call& odd : operations()) {
    for (const Call& others : operations()) {
      if (odd.text != others.text) pairs.push_back({odd, others});
    }
  }
  return pairs;
}

std::vector<Difference> differences_in_one_operation() {
  const auto ints = [](auto& g, auto& m) { return g.all_reduce(buffer_of(m.ints), ReduceOp::sum, kAsync); };
  const auto fewer = [](auto& g, auto& m) {
    return g.all_reduce(Buffer{m.one.data(), 47, DType::float32}, ReduceOp::sum, kAsync);
  };
  const auto fewer_of_each = [](auto& g, auto& m) {
    const auto size = static_cast<std::size_t>(g.size());
    return g.all_gather(Buffer{m.one.data(), 47, DType::float32}, Buffer{m.out.data(), 47 * size, DType::float32}, {},
                        kAsync);
  };
  const auto shorter = [](auto& g, auto& m) {
    return g.broadcast(Buffer{m.one.data(), 47, DType::float32}, 0, kAsync);
  };
  std::vector<Difference> differences = {
      {{"int32[48]", ints}, all_reduce_of("float32[48]")},
      {{"float32[47]", fewer}, all_reduce_of("float32[48]")},
      {{"float32[47]", fewer_of_each}, all_gather_call()},
      {{"float32[47]", shorter}, broadcast_from(0)},
      {all_reduce_of("max", ReduceOp::max), all_reduce_of("sum")},
  };
  for (const auto make : {reduce_to, broadcast_from, gather_to, scatter_from}) {
    Difference roots{make(1), make(0)};
    roots.odd.text = "root 1";
    roots.others.text = "root 0";
    differences.push_back(roots);
  }
  return differences;
}

std::vector<Difference> differences_in_order() {
  const Call reduces = all_reduce_of("all_reduce #");
  return {{then(reduces, gather_to(0)), then(gather_to(0), reduces)},
          {then(gather_to(0), reduces), then(reduces, gather_to(0))},
          {then(broadcast_from(0), scatter_from(1)), then(scatter_from(1), broadcast_from(0))},
          // One rank omits the first call.
          {gather_to(0), then(barrier_call(), gather_to(0))},
          {barrier_call(), then(gather_to(0), barrier_call())},
          {all_gather_call(), then(scatter_from(0), all_gather_call())}};
}

/// Each difference occurs in a group of its own, all at once. `members`: ranks of the world.
void expect_mismatches(Rank& r, const std::vector<Difference>& differences, const std::vector<int>& members, int odd) {
  constexpr std::size_t kAtOnce = 24;
  const auto size = static_cast<int>(members.size());
  for (std::size_t begin = 0; begin < differences.size(); begin += kAtOnce) {
    const std::size_t end = std::min(begin + kAtOnce, differences.size());
    std::vector<std::shared_ptr<ProcessGroup>> groups;
    for (std::size_t i = begin; i < end; ++i) groups.push_back(r.world->new_group(members));
    const bool takes_part = groups.front()->is_member();
    std::vector<CallMemory> memory(end - begin, CallMemory(size));
    std::vector<Work> works(end - begin);
    std::vector<Caught> caught(end - begin);
    const double start = now_s();
    for (std::size_t i = 0; takes_part && i < end - begin; ++i) {
      const Difference& difference = differences[begin + i];
      const Call& call = groups[i]->rank() == odd ? difference.odd : difference.others;
      caught[i] = catch_error([&] { works[i] = call.start(*groups[i], memory[i]); });
    }
    for (std::size_t i = 0; takes_part && i < end - begin; ++i) {
      if (!caught[i].any) {
        caught[i] = catch_error([&] {
          if (memory[i].earlier) memory[i].earlier->wait();
          works[i].wait();
          groups[i]->barrier();  // a rank that only sends learns of it in its next call
        });
      }
      const Difference& difference = differences[begin + i];
      const std::string what = fmt::format("rank {} of {} called {}, the others {}: ", odd, size, difference.odd.text,
                                           difference.others.text);
      EXPECT_TRUE(caught[i].is(ErrorKind::mismatch)) << what << caught[i];
      EXPECT_TRUE(contains(caught[i].text, difference.odd.text)) << what << caught[i];
      EXPECT_TRUE(contains(caught[i].text, difference.others.text)) << what << caught[i];
      EXPECT_TRUE(names_rank(caught[i].text, members[static_cast<std::size_t>(odd)])) << what << caught[i];
      EXPECT_GE(caught[i].info.calls.size(), 2u) << what << caught[i];
      EXPECT_LT(now_s() - start, kSoon * kSlowdown) << what << caught[i];
    }
    r.phase("the groups have failed");
    r.world->barrier();
  }
}

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// ---- Several hosts --------------------------------------------------------------------------------------------------

/// Number of ranks on each host.
struct Layout {
  std::vector<int> hosts;
  int size() const { return std::accumulate(hosts.begin(), hosts.end(), 0); }
};

std::string name_of_layout(const testing::TestParamInfo<Layout>& layout) {
  return fmt::format("hosts_of_{}", fmt::join(layout.param.hosts, "_"));
}

class HostsMismatch : public testing::TestWithParam<Layout> {
 protected:
  void run(const std::function<void(Rank&)>& body) {
    const int size = GetParam().size();
    const RunOptions options{.n = size, .as = As::processes, .init = false, .limit = Seconds(180)};
    run_ranks(options, [&](Rank& r) {
      int host = 0;
      for (int end = GetParam().hosts.front(); r.rank >= end; end += GetParam().hosts[static_cast<std::size_t>(host)])
        ++host;
      ::setenv("MANIPLE_HOST", fmt::format("host{}", host).c_str(), 1);
      ::setenv("MANIPLE_STAGE_KIB", "64", 1);  // many groups at once
      r.init();
      EXPECT_EQ(r.world->transport(), "shm+tcp");
      body(r);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Faults, HostsMismatch,
                         testing::Values(Layout{{2, 2}}, Layout{{1, 3}}, Layout{{3, 1}}, Layout{{2, 2, 2}}),
                         name_of_layout);

TEST_P(HostsMismatch, EveryPairOfOperations) {
  run([](Rank& r) {
    for (int odd = 0; odd < r.size; ++odd) expect_mismatches(r, pairs_of_operations(), first_ranks(r.size), odd);
  });
}

TEST_P(HostsMismatch, ArgumentsOfOneOperation) {
  run([](Rank& r) {
    for (int odd = 0; odd < r.size; ++odd)
      expect_mismatches(r, differences_in_one_operation(), first_ranks(r.size), odd);
  });
}

TEST_P(HostsMismatch, OrderOfOperations) {
  run([](Rank& r) {
    for (int odd = 0; odd < r.size; ++odd) expect_mismatches(r, differences_in_order(), first_ranks(r.size), odd);
  });
}

TEST_P(HostsMismatch, InASubGroup) {
  run([](Rank& r) {
    // Without rank 0, which leads the failure detector.
    std::vector<int> members = first_ranks(r.size);
    members.erase(members.begin());
    for (const int odd : {0, r.size - 2}) expect_mismatches(r, pairs_of_operations(), members, odd);
  });
}

TEST_P(HostsMismatch, OfSynchronousCallsInTheWorld) {
  run([](Rank& r) {
    float x = 1;
    std::vector<float> all(static_cast<std::size_t>(r.size));
    const Caught caught = catch_error([&] {
      r.rank == r.size - 1 ? r.world->all_reduce(buffer_of(x)) : r.world->gather(buffer_of(x), buffer_of(all), 0);
      r.world->barrier();
    });
    EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
    EXPECT_LT(caught.took, kSoon * kSlowdown);
    expect_aborted_from_now_on(r);
  });
}

}  // namespace
}  // namespace maniple::harness
