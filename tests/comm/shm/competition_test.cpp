#include "comm/shm/competition.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmath>
#include <thread>

#include <gtest/gtest.h>

namespace maniple {
namespace {

constexpr double kMs = 1e-3, kUs = 1e-6;
double nothing() noexcept { return 0; }

// What another machine on the same host takes away, the kernel does not see.
TEST(Competition, IdleGapsAreNotCompetition) {
  Competition competition;
  for (int i = 1; i < 1000; ++i)
    EXPECT_FALSE(competition.is_in_gap(i * 3 * kMs, i * 3 * kMs + (i % 2 == 0 ? 150 * kUs : 2 * kMs), 0.5, nothing))
        << i;
}

TEST(Competition, TimeSlicesOfAnotherProcessAreCompetition) {
  Competition competition;
  double now = 0, delay = 7;
  competition.is_in_gap(now, now + 100 * kUs, delay, nothing);
  for (int i = 0; i < 100; ++i) {
    now += i % 10 == 0 ? 5 : 4 * kMs;  // also after a long time without one
    delay += 4 * kMs;
    EXPECT_TRUE(competition.is_in_gap(now - 4 * kMs, now, delay, nothing)) << i;
  }
}

TEST(Competition, ManyShortGapsOfAnotherProcessAreCompetition) {
  Competition competition;
  double now = 1, delay = 0;
  competition.is_in_gap(now - 100 * kUs, now, delay, nothing);
  int seen = 0;
  for (int i = 0; i < 105; ++i) {
    now += 500 * kUs;
    delay += 100 * kUs;
    seen += competition.is_in_gap(now - 100 * kUs, now, delay, nothing) ? 1 : 0;
  }
  EXPECT_EQ(seen, 5);  // each 10 ms
}

// Where the host makes many gaps, something short in one of them is none, either.
TEST(Competition, BriefDelaysAmongManyGapsAreNotCompetition) {
  Competition competition;
  double now = 1, delay = 0;
  for (int i = 0; i < 1000; ++i) {
    now += 200 * kUs;
    if (i % 50 == 0) delay += 60 * kUs;
    EXPECT_FALSE(competition.is_in_gap(now - 100 * kUs, now, delay, nothing)) << i;
  }
}

// A thread of the kernel that runs for some microseconds now and then.
TEST(Competition, OccasionalBriefDelaysAreNotCompetition) {
  Competition competition;
  double now = 1, delay = 0;
  for (int i = 0; i < 1000; ++i) {
    now += 10 * kMs;
    delay += 20 * kUs;
    EXPECT_FALSE(competition.is_in_gap(now - 80 * kUs, now, delay, nothing)) << i;
  }
}

// The host takes the core away while something short runs on it, again and again: the kernel counts all of it as delay.
TEST(Competition, StolenTimeIsNotCompetition) {
  static double taken;
  taken = 1000;
  Competition competition;
  const auto stolen = []() noexcept { return std::floor(taken / 10e-3) * 10e-3; };
  double now = 1, delay = 3;
  const auto gap = [&](double length) {
    now += length;
    delay += length;
    return competition.is_in_gap(now - length, now, delay, stolen);
  };
  gap(100 * kUs);
  for (int i = 0; i < 1000; ++i) {
    now += 15 * kMs;
    taken += 8 * kMs;  // of which 3 as delay
    EXPECT_FALSE(gap(3 * kMs)) << i;
  }
  // Another process comes, and the host takes less: soon all of its gaps are seen.
  int seen = 0;
  for (int i = 0; i < 1000; ++i) {
    now += 4 * kMs;
    taken += kMs;
    seen += gap(4 * kMs) ? 1 : 0;
  }
  EXPECT_GT(seen, 950);
}

TEST(Competition, StolenTimeIsReadFromTheKernel) {
  const double before = Competition::stolen_from_core();
  EXPECT_GE(before, 0);
  EXPECT_LT(before, 1e9);
  EXPECT_FALSE(Competition::is_in_gap_of_thread(1, 1 + 60 * kUs) &&
               Competition::delay_of_thread());  // the first tells nothing
}

TEST(Competition, WithoutAKernelCountEveryGapIsCompetition) {
  Competition competition;
  EXPECT_TRUE(competition.is_in_gap(1, 1 + 60 * kUs, std::nullopt, nothing));
}

double seconds_of_thread() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Two processes on one core: each is ready to run while the other runs.
TEST(Competition, TheKernelCounts) {
  const std::optional<double> before = Competition::delay_of_thread();
  if (!before) GTEST_SKIP() << "this kernel does not count";
  cpu_set_t all, one;
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(::sched_getcpu()), &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  const pid_t other = ::fork();
  if (other == 0) {
    for (volatile int turns = 0;;) turns = turns + 1;
  }
  const double start = seconds_of_thread();
  while (seconds_of_thread() < start + 0.05 && *Competition::delay_of_thread() == *before) {
  }
  ::kill(other, SIGKILL);
  ::waitpid(other, nullptr, 0);
  ::sched_setaffinity(0, sizeof all, &all);
  EXPECT_GT(*Competition::delay_of_thread(), *before);
}

}  // namespace
}  // namespace maniple
