// Schedules of pipelines, without ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "comm/base/format.h"
#include "train/pipeline/schedule.h"

namespace maniple::pipeline_schedule_test {
namespace {

using Kind = PipelineAction::Kind;

std::vector<PipelineActions> actions_of_all(const ScheduleInfo& schedule, int ranks, int chunks, int micro_batches) {
  std::vector<PipelineActions> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(schedule.make({rank, ranks, chunks, micro_batches}));
  return all;
}

/// The time until all have done their actions, where a forward takes 1 / chunks and a backward twice as long; -1: they
/// wait for each other.
double simulate(const std::vector<PipelineActions>& all, int chunks) {
  const int ranks = static_cast<int>(all.size()), stages = ranks * chunks;
  std::map<std::tuple<Kind, int, int>, double> done;
  std::vector<std::size_t> at(all.size(), 0);
  std::vector<double> clock(all.size(), 0.0);
  for (bool moves = true; moves;) {
    moves = false;
    for (std::size_t r = 0; r < all.size(); ++r) {
      for (; at[r] < all[r].size(); ++at[r], moves = true) {
        const PipelineAction& action = all[r][at[r]];
        const int stage = action.chunk * ranks + static_cast<int>(r), m = action.micro_batch;
        const bool ends = action.kind == Kind::forward ? stage == 0 : stage == stages - 1;
        const auto before = std::tuple(ends ? Kind::forward : action.kind,
                                       ends                           ? stage
                                       : action.kind == Kind::forward ? stage - 1
                                                                      : stage + 1,
                                       m);
        const bool first = action.kind == Kind::forward && stage == 0;
        if (!first && done.count(before) == 0) break;
        if (action.kind == Kind::backward && done.count({Kind::forward, stage, m}) == 0) break;
        clock[r] = std::max(clock[r], first ? 0.0 : done[before]) + (action.kind == Kind::forward ? 1.0 : 2.0) / chunks;
        done[{action.kind, stage, m}] = clock[r];
      }
    }
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (at[r] != all[r].size()) return -1;
  }
  return *std::max_element(clock.begin(), clock.end());
}

TEST(PipelineSchedule, EveryActionRunsOnceWithoutDeadlock) {
  for (const ScheduleInfo& schedule : schedules()) {
    EXPECT_EQ(&info(schedule.schedule), &schedule);
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (int chunks = 1; chunks <= (schedule.several_stages ? 4 : 1); ++chunks) {
        for (int m = 1; m <= 19; ++m) {
          const auto all = actions_of_all(schedule, ranks, chunks, m);
          const std::string which =
              format_text("{}, {} ranks, {} stages each, {} micro-batches", schedule.name, ranks, chunks, m);
          for (const PipelineActions& actions : all) {
            std::set<std::tuple<Kind, int, int>> seen;
            std::vector<int> last(static_cast<std::size_t>(chunks), -1);
            for (const PipelineAction& action : actions) {
              EXPECT_TRUE(seen.emplace(action.kind, action.chunk, action.micro_batch).second) << which;
              if (action.kind == Kind::forward) continue;
              EXPECT_EQ(action.micro_batch, ++last[static_cast<std::size_t>(action.chunk)])
                  << which << ": the order of additions";
            }
            ASSERT_EQ(seen.size(), static_cast<std::size_t>(2 * chunks * m)) << which;
          }
          ASSERT_GT(simulate(all, chunks), 0) << which << ": a deadlock";
        }
      }
    }
  }
}

TEST(PipelineSchedule, RanksAreIdleAsLittleAsTheTheorySays) {
  for (int ranks = 1; ranks <= 6; ++ranks) {
    for (int m = ranks; m <= 24; m += ranks) {
      const double expected = 3.0 * (m + ranks - 1);
      EXPECT_DOUBLE_EQ(simulate(actions_of_all(info(PipelineSchedule::gpipe), ranks, 1, m), 1), expected);
      EXPECT_DOUBLE_EQ(simulate(actions_of_all(info(PipelineSchedule::one_f_one_b), ranks, 1, m), 1), expected);
      for (int chunks = 2; chunks <= 4; ++chunks) {
        EXPECT_NEAR(simulate(actions_of_all(info(PipelineSchedule::interleaved), ranks, chunks, m), chunks),
                    3.0 * (m + (ranks - 1.0) / chunks), 1e-9)
            << ranks << " ranks, " << chunks << " stages each, " << m;
      }
    }
  }
}

TEST(PipelineSchedule, OneForwardOneBackwardKeepsFewActivations) {
  for (int ranks = 1; ranks <= 6; ++ranks) {
    const auto all = actions_of_all(info(PipelineSchedule::one_f_one_b), ranks, 1, 20);
    for (int rank = 0; rank < ranks; ++rank) {
      int kept = 0, most = 0;
      for (const PipelineAction& action : all[static_cast<std::size_t>(rank)]) {
        most = std::max(most, kept += action.kind == Kind::forward ? 1 : -1);
      }
      EXPECT_EQ(most, ranks - rank);
    }
  }
}

}  // namespace
}  // namespace maniple::pipeline_schedule_test
