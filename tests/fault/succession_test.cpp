// Fault 33 and its kin: the failure detector survives its leaders. Rank 0 is the first of them; when it leaves, is
// killed or is stopped, the next one leads, and later faults are noticed as before.
#include <algorithm>
#include <csignal>
#include <numeric>
#include <random>

#include <fmt/format.h>

#include "comm/base/abort_signal.h"
#include "fault/expect_error.h"
#include "fault/ways.h"

namespace maniple::harness {
namespace {

class Succession : public EveryTransport {};
INSTANTIATE_TEST_SUITE_P(Faults, Succession, process_transports(), transport_name);

enum class Way { leave, kill, stop };

/// Those that go at the same time, each in its way.
using Step = std::vector<std::pair<int, Way>>;

constexpr double kSoon = 12;  // seconds; far below an operation's limit, above a silent rank's

std::vector<int> without(std::vector<int> ranks, const Step& step) {
  for (const auto& [rank, way] : step) std::erase(ranks, rank);
  return ranks;
}

std::string text_of(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps) {
    text += "|";
    for (const auto& [rank, way] : step)
      text += fmt::format(" {} {}", way == Way::leave ? "leave" : way == Way::kill ? "kill" : "stop", rank);
  }
  return text;
}

void go(Rank& r, Way way, std::vector<std::shared_ptr<ProcessGroup>>& groups) {
  if (way == Way::kill) r.kill_self();
  if (way == Way::stop) return r.stop_self();
  groups.clear();
  r.world.reset();
}

// Those that remain use the group of all before the step, which fails and names one of those that went, and then the
// group of those that remain, which does not.
void run_steps(TransportKind transport, int n, const std::vector<Step>& steps) {
  RunOptions run;
  run.n = n;
  run.as = As::processes;
  run.transport = transport;
  run.timeout = Seconds(60);
  run.limit = Seconds(120);
  for (const Step& step : steps) {
    for (const auto& [rank, way] : step) {
      if (way != Way::leave) run.expect_dead.push_back(rank);
    }
  }
  run_ranks(run, [&](Rank& r) {
    SCOPED_TRACE(text_of(steps));
    std::vector<int> ranks(static_cast<std::size_t>(n));
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<std::shared_ptr<ProcessGroup>> groups = {r.world->new_group(ranks)};
    std::vector<std::size_t> sizes = {ranks.size()};
    for (const Step& step : steps) {
      ranks = without(ranks, step);
      groups.push_back(r.world->new_group(ranks));
      sizes.push_back(ranks.size());
    }
    r.phase("all groups are made");
    for (std::size_t k = 0; k < steps.size(); ++k) {
      bool killed = false;
      std::vector<int> goers;
      for (const auto& [rank, way] : steps[k]) {
        if (rank == r.rank) return go(r, way, groups);
        killed |= way != Way::leave;
        goers.push_back(rank);
      }
      // A rank that leaves is not lost; over TCP a first message from it is awaited.
      if (killed) {
        const Caught caught = catch_error([&] {
          for (;;) {
            std::vector<float> values(1000, 1.0f);
            groups[k]->all_reduce(buffer_of(values));
          }
        });
        EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
        EXPECT_NE(std::find(goers.begin(), goers.end(), caught.lost_rank), goers.end()) << caught;
        EXPECT_LT(caught.took, kSoon) << caught;
      }
      int value = 1;
      groups[k + 1]->all_reduce(buffer_of(value));
      EXPECT_EQ(value, static_cast<int>(sizes[k + 1]));
      r.phase(fmt::format("step {} is over", k));  // a rank that has come out of a call may be ahead of the others
    }
  });
}

TEST_P(Succession, KilledAfterRankZeroHasLeft) { run_steps(GetParam(), 4, {{{0, Way::leave}}, {{2, Way::kill}}}); }

TEST_P(Succession, KilledAfterRankZeroWasKilled) { run_steps(GetParam(), 4, {{{0, Way::kill}}, {{2, Way::kill}}}); }

TEST_P(Succession, StoppedAfterRankZeroHasLeft) { run_steps(GetParam(), 4, {{{0, Way::leave}}, {{2, Way::stop}}}); }

TEST_P(Succession, KilledAfterRankZeroWasStopped) { run_steps(GetParam(), 4, {{{0, Way::stop}}, {{3, Way::kill}}}); }

TEST_P(Succession, TheNextOneIsDeadToo) {
  run_steps(GetParam(), 5, {{{0, Way::kill}, {1, Way::kill}}, {{3, Way::kill}}});
}

TEST_P(Succession, TheNextOneIsStopped) {
  run_steps(GetParam(), 4, {{{0, Way::leave}, {1, Way::stop}}, {{3, Way::kill}}});
}

TEST_P(Succession, KilledWhileRankZeroLeaves) {
  for (int repetition = 0; repetition < 4; ++repetition) run_steps(GetParam(), 4, {{{0, Way::leave}, {2, Way::kill}}});
}

TEST_P(Succession, KilledWhileRankZeroIsKilled) {
  for (int repetition = 0; repetition < 4; ++repetition) run_steps(GetParam(), 4, {{{0, Way::kill}, {3, Way::kill}}});
}

TEST_P(Succession, InAnyOrder) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    const int n = 3 + static_cast<int>(seed % 3);
    std::vector<int> order(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    if (seed % 2 == 0) std::shuffle(order.begin() + 1, order.end(), random);  // the lead goes on from rank to rank
    if (seed % 4 == 1) std::shuffle(order.begin(), order.end(), random);
    std::vector<Step> steps;
    for (int i = 0; i + 1 < n;) {
      Step step;
      const int together = i + 2 < n && random() % 3 == 0 ? 2 : 1;
      for (int j = 0; j < together; ++j) {
        step.emplace_back(order[static_cast<std::size_t>(i + j)], random() % 2 == 0 ? Way::leave : Way::kill);
      }
      i += together;
      steps.push_back(std::move(step));
    }
    run_steps(GetParam(), n, steps);
  }
}

// All leave at the end, each when it is ready: no rank takes one that has left for one that is lost, and what was
// sent before is received.
TEST_P(Succession, AllLeaveInAnyOrder) {
  for (int repetition = 0; repetition < 6; ++repetition) {
    run_ranks({.n = 5, .as = As::processes, .transport = GetParam()}, [&](Rank& r) {
      r.world->barrier();
      const int last = (repetition + 4) % r.size;
      std::vector<int> values(50'000, r.rank);
      if (r.rank != last) {
        const Work sent = r.world->isend(buffer_of(values), last);
        sent.wait();
        r.world.reset();
      } else {
        for (int from = 0; from < r.size; ++from) {
          if (from == last) continue;
          r.world->recv(buffer_of(values), from);
          EXPECT_EQ(values.back(), from);
        }
      }
      r.phase("all but one have left");
      if (r.rank == last) {
        const auto error = r.world->error();
        EXPECT_EQ(error, nullptr) << maniple::text_of(error);
      }
    });
  }
}

}  // namespace
}  // namespace maniple::harness
