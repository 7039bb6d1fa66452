#include <maniple/comm/deadline.h>

#include <gtest/gtest.h>

#include <chrono>
#include <limits>

namespace maniple {
namespace {

using namespace std::chrono_literals;

TEST(Deadline, NeverExpires) {
  const Deadline never;
  EXPECT_TRUE(never.is_never());
  EXPECT_FALSE(never.expired());
  EXPECT_EQ(never.remaining(), Deadline::Duration::max());
  EXPECT_EQ(never.poll_ms(), -1);
  EXPECT_EQ(never, Deadline::never());
}

TEST(Deadline, ZeroAndLessHaveExpired) {
  for (const auto limit : {0s, -1s, -100000s}) {
    const auto deadline = Deadline::after(limit);
    EXPECT_TRUE(deadline.expired());
    EXPECT_EQ(deadline.remaining(), Deadline::Duration::zero());
    EXPECT_EQ(deadline.poll_ms(), 0);
  }
}

TEST(Deadline, NanAndLargeNegativeLimitsHaveExpired) {
  for (const double seconds :
       {std::numeric_limits<double>::quiet_NaN(), -1e300, -std::numeric_limits<double>::infinity()}) {
    const auto deadline = Deadline::after(std::chrono::duration<double>(seconds));
    EXPECT_TRUE(deadline.expired()) << seconds;
    EXPECT_EQ(deadline.remaining(), Deadline::Duration::zero()) << seconds;
  }
}

TEST(Deadline, VeryLargeLimitsMeanNever) {
  EXPECT_TRUE(Deadline::after(std::chrono::duration<double>(1e300)).is_never());
  EXPECT_TRUE(Deadline::after(std::chrono::hours::max()).is_never());
  EXPECT_FALSE(Deadline::after(std::chrono::hours(24 * 365)).is_never());
}

TEST(Deadline, CountsDown) {
  const auto deadline = Deadline::after(1h);
  EXPECT_FALSE(deadline.expired());
  EXPECT_LE(deadline.remaining(), 1h);
  EXPECT_GT(deadline.remaining(), 59min);
}

TEST(Deadline, MillisecondsAreRoundedUpAndCapped) {
  // Rounding down would make a poll loop spin through the last millisecond.
  const auto soon = Deadline(Deadline::Clock::now() + 10min + 1us);
  EXPECT_GT(soon.poll_ms(), 590'000);
  EXPECT_LE(soon.poll_ms(), 600'001);
  EXPECT_EQ(soon.poll_ms(50), 50);
  const Deadline in_a_moment(Deadline::Clock::now() + 500us);
  const int left = in_a_moment.poll_ms();
  EXPECT_TRUE(left == 1 || in_a_moment.expired()) << left;
}

TEST(Deadline, SoonerPicksTheEarlier) {
  const auto early = Deadline::after(1s);
  const auto late = Deadline::after(2s);
  EXPECT_EQ(Deadline::sooner(early, late), early);
  EXPECT_EQ(Deadline::sooner(late, early), early);
  EXPECT_EQ(Deadline::sooner(early, Deadline::never()), early);
  EXPECT_LT(early, late);
}

}  // namespace
}  // namespace maniple
