// What `maniple bench elastic` computes from recorded events, without running anything.
#include "tools/bench/elastic_bench.h"

#include <gtest/gtest.h>

namespace maniple::bench {
namespace {

using Kind = ElasticEvent::Kind;

ElasticEvent event(Kind kind, double at, std::int64_t step, int pid, int ranks) {
  return {.at = at, .step = step, .pid = pid, .ranks = ranks, .kind = kind};
}

/// Processes 1 and 2 make two steps of 1 s; process 2 dies. Process 1 makes a step after 5 s and two of 2 s; process 3,
/// which has been ready for 1 s then, joins, with a first step after 4 s, and one of 1 s.
std::vector<ElasticEvent> with_a_fault() {
  return {event(Kind::ready, 8, 0, 1, 0),     event(Kind::ready, 9, 0, 2, 0),   event(Kind::step, 10, 1, 1, 2),
          event(Kind::step, 10.1, 1, 2, 2),   event(Kind::step, 11.2, 2, 2, 2), event(Kind::step, 11, 2, 1, 2),
          event(Kind::killed, 11.5, 2, 2, 2), event(Kind::step, 16.5, 3, 1, 1), event(Kind::step, 18.5, 4, 1, 1),
          event(Kind::ready, 19.5, 0, 3, 0),  event(Kind::step, 20.5, 5, 1, 1), event(Kind::step, 24.5, 6, 3, 2),
          event(Kind::step, 24.6, 6, 1, 2),   event(Kind::step, 25.5, 7, 1, 2), event(Kind::step, 25.6, 7, 3, 2)};
}

void expect(const std::vector<double>& seconds, const std::vector<double>& expected) {
  ASSERT_EQ(seconds.size(), expected.size());
  for (std::size_t i = 0; i < seconds.size(); ++i) EXPECT_NEAR(seconds[i], expected[i], 1e-9) << i;
}

TEST(ElasticBench, AStepEndsWithItsFirstRecord) {
  expect(step_times(with_a_fault(), 2), {1, 1});
  expect(step_times(with_a_fault(), 1), {2, 2});
}

TEST(ElasticBench, TheSurvivorsStepDoesNotCount) { expect(times_to_go_on(with_a_fault()), {5 - 2}); }

TEST(ElasticBench, TheReplacementsFirstStepDoesNotCount) { expect(times_to_join(with_a_fault()), {5 - 1}); }

TEST(ElasticBench, AFaultAtTheEndOfTheRecordsIsLeftOut) {
  std::vector<ElasticEvent> events = with_a_fault();
  events.push_back(event(Kind::killed, 26, 7, 3, 2));
  events.push_back(event(Kind::ready, 27, 0, 4, 0));
  EXPECT_EQ(times_to_go_on(events).size(), 1U);
  EXPECT_EQ(times_to_join(events).size(), 1U);
}

TEST(ElasticBench, WithoutAFaultNothingIsMeasured) {
  std::vector<ElasticEvent> events = with_a_fault();
  events.resize(6);
  EXPECT_TRUE(times_to_go_on(events).empty());
  EXPECT_TRUE(times_to_join(events).empty());
}

TEST(ElasticBench, SpreadOfOddAndEvenCounts) {
  const Spread odd({3, 1, 2}), even({4, 1, 2, 3});
  EXPECT_EQ(odd.median, 2);
  EXPECT_EQ(even.median, 2.5);
  EXPECT_EQ(even.min, 1);
  EXPECT_EQ(even.max, 4);
  EXPECT_EQ(even.count, 4);
}

}  // namespace
}  // namespace maniple::bench
