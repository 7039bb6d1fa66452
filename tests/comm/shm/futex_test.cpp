#include "comm/shm/waiter.h"

#include <gtest/gtest.h>

#include "comm/shm/sleeper.h"

namespace maniple {
namespace {

using std::chrono::milliseconds;
using Clock = Deadline::Clock;

TEST(Futex, DoesNotSleepWhenTheWordHasChanged) {
  std::atomic<std::uint32_t> word{1};
  futex_wait(word, 0, Deadline::never());  // would not return otherwise
  EXPECT_EQ(word, 1u);
}

TEST(Futex, SleepsUntilTheDeadline) {
  std::atomic<std::uint32_t> word{0};
  const auto start = Clock::now();
  const Deadline deadline = Deadline::after(milliseconds(20));
  while (!deadline.expired()) futex_wait(word, 0, deadline);  // it may return early
  EXPECT_GE(Clock::now() - start, milliseconds(20));
  futex_wait(word, 0, Deadline::after(milliseconds(0)));
  futex_wait(word, 0, Deadline::after(milliseconds(-5)));
}

TEST(Futex, WakesEverySleeper) {
  std::atomic<std::uint32_t> word{0};
  const auto sleep = [&] {
    while (word.load() == 0) futex_wait(word, 0, Deadline::never());
  };
  Sleeper first(sleep);
  Sleeper second(sleep);
  EXPECT_TRUE(first.falls_asleep());
  EXPECT_TRUE(second.falls_asleep());
  word.store(1);
  futex_wake_all(word);
  first.join();
  second.join();
}

}  // namespace
}  // namespace maniple
