#include "comm/shm/waiter.h"

#include <gtest/gtest.h>

#include "comm/shm/sleeper.h"

namespace maniple {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Duration = WaitPolicy::Duration;

constexpr std::uint64_t kStart = std::uint64_t{1} << 50;

std::uint64_t in_ticks(Duration duration) {
  return static_cast<std::uint64_t>(std::chrono::duration<double>(duration).count() * ticks_per_second());
}

// Gaps mean nothing to this waiter, so that the clock may be moved on.
Waiter without_competition() {
  return Waiter({.spin = milliseconds(1), .yield = milliseconds(4), .detects_competition = false});
}

TEST(WaitPolicy, MemoryWithACoreForEachRank) {
  const WaitPolicy policy = WaitPolicy::for_memory(4, 4);
  EXPECT_EQ(policy.spin, microseconds(20));
  EXPECT_EQ(policy.yield, milliseconds(1));
  EXPECT_TRUE(policy.detects_competition);
}

TEST(WaitPolicy, MemoryWithMoreRanksThanCores) {
  const WaitPolicy some = WaitPolicy::for_memory(32, 2);
  EXPECT_EQ(some.spin, Duration::zero());
  EXPECT_EQ(some.yield, milliseconds(1));
  EXPECT_FALSE(some.detects_competition);
  const WaitPolicy many = WaitPolicy::for_memory(33, 2);
  EXPECT_EQ(many.yield, Duration::zero());
}

TEST(WaitPolicy, SocketsWithACoreForEachRankAndWithout) {
  const WaitPolicy roomy = WaitPolicy::for_sockets(2, 2);
  EXPECT_EQ(roomy.spin, microseconds(20));
  EXPECT_EQ(roomy.spin + roomy.yield, milliseconds(1));
  const WaitPolicy crowded = WaitPolicy::for_sockets(3, 2);
  EXPECT_EQ(crowded.spin, microseconds(20));
  EXPECT_EQ(crowded.yield, Duration::zero());
  EXPECT_TRUE(crowded.detects_competition);
}

TEST(WaitPolicy, TheGivenTimeReplacesTheDefault) {
  EXPECT_EQ(WaitPolicy::for_memory(3, 2, 7).spin, microseconds(7));
  EXPECT_EQ(WaitPolicy::for_memory(3, 2, 7).yield, milliseconds(1));
  EXPECT_EQ(WaitPolicy::for_memory(2, 2, 0).spin, Duration::zero());
  EXPECT_EQ(WaitPolicy::for_sockets(2, 2, 7).spin, microseconds(7));
  EXPECT_EQ(WaitPolicy::for_sockets(2, 2, 7).yield, Duration::zero());
  EXPECT_EQ(WaitPolicy::for_sockets(2, 2, 50).spin, microseconds(20));
  EXPECT_EQ(WaitPolicy::for_sockets(2, 2, 50).yield, microseconds(30));
}

TEST(Waiter, SpinsThenYieldsThenSleeps) {
  Waiter waiter = without_competition();
  Waiter::Wait wait(waiter, kStart);
  EXPECT_TRUE(wait.may_spin());
  wait.read_clock(kStart + in_ticks(microseconds(900)));
  EXPECT_TRUE(wait.may_spin());
  wait.read_clock(kStart + in_ticks(microseconds(1100)));
  EXPECT_FALSE(wait.may_spin());
  EXPECT_TRUE(wait.may_yield());
  wait.resume(kStart + in_ticks(microseconds(4900)));
  EXPECT_TRUE(wait.may_yield());
  wait.resume(kStart + in_ticks(microseconds(5100)));
  EXPECT_FALSE(wait.may_yield());
}

TEST(Waiter, SpinningEndsAsSoonAsItIsDone) {
  Waiter waiter = without_competition();
  Waiter::Wait wait(waiter, kStart);
  int polls = 0;
  EXPECT_TRUE(wait.spin([&] { return ++polls == 3; }));
  EXPECT_EQ(polls, 3);
  EXPECT_EQ(wait.now(), kStart) << "the clock was read";
  EXPECT_FALSE(wait.spin([&] { return ++polls < 0; }));
  EXPECT_NE(wait.now(), kStart);
}

TEST(Waiter, DoesNotYieldForAWhileAfterCompetitionWasSeen) {
  Waiter waiter = without_competition();
  EXPECT_FALSE(waiter.has_competition(kStart));
  waiter.set_competition(kStart);
  Waiter::Wait wait(waiter, kStart);
  EXPECT_TRUE(wait.may_spin());
  EXPECT_FALSE(wait.may_yield());
  EXPECT_TRUE(waiter.has_competition(kStart + in_ticks(milliseconds(900))));
  const std::uint64_t later = kStart + in_ticks(milliseconds(1100));
  EXPECT_FALSE(waiter.has_competition(later));
  EXPECT_TRUE(Waiter::Wait(waiter, later).may_yield());
}

TEST(Waiter, AGapIsNotCompetitionWhereRanksYieldToEachOther) {
  Waiter waiter = without_competition();
  Waiter::Wait wait(waiter, kStart);
  wait.read_clock(kStart + in_ticks(milliseconds(3)));
  EXPECT_FALSE(waiter.has_competition(wait.now()));
}

TEST(Waiter, TimeOfOtherWorkIsNotAGap) {
  Waiter waiter({.spin = milliseconds(1), .yield = milliseconds(4)});
  Waiter::Wait wait(waiter, kStart);
  for (int i = 1; i < 100; ++i) wait.resume(kStart + in_ticks(i * seconds(1)));
  EXPECT_FALSE(waiter.has_competition(wait.now()));
}

TEST(Waiter, SleepsUntilItIsWoken) {
  Waiter waiter = without_competition();
  std::atomic<std::uint32_t> word{0};
  Sleeper sleeper([&] {
    Waiter::Wait wait(waiter);
    while (word.load() == 0) wait.sleep_while(word, 0, Deadline::never());
  });
  EXPECT_TRUE(sleeper.falls_asleep());
  word.store(1);
  futex_wake_all(word);
  sleeper.join();
}

TEST(Waiter, SleepsNoLongerThanTheDeadlineNorWhenTheWordHasChanged) {
  Waiter waiter = without_competition();
  Waiter::Wait wait(waiter);
  const std::atomic<std::uint32_t> word{1};
  wait.sleep_while(word, 0, Deadline::never());
  wait.sleep_while(word, 1, Deadline::after(seconds(0)));
  const Deadline deadline = Deadline::after(milliseconds(1));
  while (!deadline.expired()) wait.sleep_while(word, 1, deadline);
}

}  // namespace
}  // namespace maniple
