#include "bench/goals.h"

#include <gtest/gtest.h>

#include "bench/rows.h"
#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

Goal five_times() {
  Goal goal;
  goal.text = "registered";
  goal.factor = 5;
  goal.rival = "openmpi";
  goal.buffer = "registered";
  goal.from = kMiB;
  goal.to = 16 * kMiB;
  return goal;
}

TEST(Goals, TheWorstSizeCounts) {
  const std::vector<Row> rows = {
      row_of("native", "registered", 2, kMiB, 10),      row_of("openmpi", "ordinary", 2, kMiB, 100),
      row_of("native", "registered", 2, 16 * kMiB, 10), row_of("openmpi", "ordinary", 2, 16 * kMiB, 40),
      row_of("native", "registered", 2, 64 * kMiB, 10), row_of("openmpi", "ordinary", 2, 64 * kMiB, 1)};
  const Verdict verdict = judge(five_times(), rows);
  EXPECT_TRUE(verdict.measured);
  EXPECT_FALSE(verdict.reached);
  EXPECT_DOUBLE_EQ(verdict.worst, 4) << "64 MiB is outside of the goal";
  EXPECT_EQ(verdict.bytes, 16 * kMiB);
}

TEST(Goals, WithoutTheRivalNothingIsReached) {
  const Verdict verdict = judge(five_times(), {row_of("native", "registered", 2, kMiB, 10)});
  EXPECT_FALSE(verdict.measured);
  EXPECT_FALSE(verdict.reached);
}

TEST(Goals, TimesAreAtMost) {
  Goal goal = five_times();
  goal.kind = Goal::Kind::time_at_most;
  goal.factor = 1.5;
  goal.buffer = "";
  const std::vector<Row> rows = {row_of("native", "registered", 2, kMiB, 10), row_of("native", "ordinary", 2, kMiB, 14),
                                 row_of("openmpi", "ordinary", 2, kMiB, 10)};
  const Verdict verdict = judge(goal, rows);
  EXPECT_TRUE(verdict.reached);
  EXPECT_DOUBLE_EQ(verdict.worst, 1.4) << "without a buffer kind the slower one counts";
}

TEST(Goals, LimitsAreComparedBufferByBuffer) {
  Goal goal = five_times();
  goal.rival = "limit";
  goal.factor = 0.7;
  const std::vector<Row> rows = {row_of("native", "registered", 2, kMiB, 10), row_of("limit", "ordinary", 2, kMiB, 1),
                                 row_of("limit", "registered", 2, kMiB, 9)};
  EXPECT_DOUBLE_EQ(judge(goal, rows).worst, 0.9);
}

TEST(Goals, TheCostOfTheChecksIsThatOfItsOwnBlock) {
  Goal goal = five_times();
  goal.kind = Goal::Kind::extra_at_most_us;
  goal.rival = "bare";
  goal.factor = 0.06;
  const std::vector<Row> rows = {row_of("native", "registered", 2, kMiB, 1.05), row_of("bare", "registered", 2, kMiB, 1),
                                 row_of("native", "registered", 2, kMiB, 1.5)};
  EXPECT_NEAR(judge(goal, rows).worst, 0.05, 1e-9);
}

TEST(Goals, AWireCarriesItsPayload) {
  EXPECT_NEAR(payload_rate("1gbit"), 119.55e6, 0.01e6);
  EXPECT_NEAR(payload_rate("100mbit"), 11.955e6, 0.001e6);
  EXPECT_THROW(payload_rate("fast"), InvalidArgument);
  Goal goal;
  goal.kind = Goal::Kind::wire_at_least;
  goal.factor = 0.93;
  goal.from = goal.to = 64 * kMiB;
  goal.hosts = 2;
  goal.link = "1gbit";
  Row row = row_of("native", "ordinary", 2, 64 * kMiB, 64.0 * kMiB / 119.55e6 * 1e6);
  row.hosts = 2;
  row.link = "1gbit";
  EXPECT_NEAR(judge(goal, {row}).worst, 1, 0.001);
}

TEST(Goals, EveryGoalIsCoveredByTheBlocks) {
  const std::vector<Block> blocks = figure_blocks({}, 1, 0.1);
  for (const Goal& goal : goals()) {
    for (const int ranks : goal.ranks) {
      const bool covered = std::any_of(blocks.begin(), blocks.end(), [&](const Block& block) {
        const Order& order = block.wanted.front();
        const bool sizes = std::any_of(order.bytes.begin(), order.bytes.end(),
                                       [&](std::uint64_t b) { return b >= goal.from && b <= goal.to; });
        const bool rival = goal.rival.empty() ||
                           std::find(block.systems.begin(), block.systems.end(), goal.rival) != block.systems.end();
        return block.hosts == goal.hosts && block.link == goal.link && order.ranks == ranks && sizes && rival;
      });
      EXPECT_TRUE(covered) << goal.text;
    }
  }
}

}  // namespace
}  // namespace maniple::bench
