#include "comm/session/silence.h"

#include <gtest/gtest.h>

namespace maniple {
namespace {

constexpr double kLimit = 2.5;
constexpr double kPeriod = kLimit / 10;

/// The time at which the observer, who looks at the times given by `next`, finds that the limit is reached.
template <class Next, class Heard>
double lost_at(Next next, Heard heard, double end = 100) {
  Silence silence;
  double now = 0;
  while (now < end) {
    const double then = next(now);
    silence.look(then - now, kPeriod, heard(now, then));
    now = then;
    if (silence.seconds() >= kLimit) return now;
  }
  return -1;
}

double on_time(double now) { return now + kPeriod; }
bool never(double, double) { return false; }

TEST(Silence, IsALossAtTheLimitAndNotBefore) {
  const double when = lost_at(on_time, never);
  EXPECT_GE(when, kLimit);
  EXPECT_LE(when, kLimit + 2 * kPeriod);
}

TEST(Silence, BelowTheLimitIsNoLoss) {
  // One heartbeat in each 2.4 s.
  EXPECT_EQ(lost_at(on_time,
                    [](double from, double to) { return static_cast<int>(from / 2.4) != static_cast<int>(to / 2.4); }),
            -1);
}

// The observer runs for a moment in each 0.9 s only: it counts what it could have heard, and no more.
TEST(Silence, OfAStarvedObserverCountsLess) {
  const auto starved = [](double now) { return now + 0.9; };
  EXPECT_EQ(lost_at(starved, [](double from, double) { return static_cast<int>(from / 0.9) % 3 == 2; }), -1)
      << "a heartbeat in each third look";
  EXPECT_GE(lost_at(starved, never), 2 * kLimit) << "but it ends";
}

TEST(Silence, WhileTheObserverWasStoppedProvesNothing) {
  const auto stopped_once = [](double now) { return now < 2 && now + kPeriod >= 2 ? now + 60 : now + kPeriod; };
  const double when = lost_at(stopped_once, never);
  EXPECT_GE(when, 60 + kLimit - 2);
}

TEST(Silence, EndsWhenSomethingArrives) {
  Silence silence;
  for (int i = 0; i < 9; ++i) silence.look(kPeriod, kPeriod, false);
  EXPECT_NEAR(silence.seconds(), 9 * kPeriod, 1e-9);
  silence.look(kPeriod, kPeriod, true);
  EXPECT_EQ(silence.seconds(), 0);
}

}  // namespace
}  // namespace maniple
