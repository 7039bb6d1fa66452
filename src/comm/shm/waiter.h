// How a thread waits for another rank: it spins, then yields its core between polls, then sleeps until it is woken.
//
//   Waiter::Wait wait(waiter);
//   while (wait.may_spin()) {
//     if (wait.spin(done)) return;
//   }
//   while (wait.may_yield()) {
//     if (done()) return;
//     wait.yield();
//   }
//   while (!done() && !deadline.expired()) wait.sleep_while(word, seen, deadline);
//
// Spin: the other rank is usually a few hundred nanoseconds behind, less than a system call takes.
// Yield: more ranks than cores take turns. A rank gets its turn sooner this way than by falling asleep and being woken.
// A thread that waits for sockets calls poll(2) instead and keeps its core, because waking an idle core is slow,
// especially on a virtual machine.
// Sleep: on a futex, or in poll(2).
//
// If other processes compete for the cores, a yield loses the core for a whole time slice, the time of a thousand
// operations, while a sleeping thread gets a core as soon as it is woken. So after a *gap*, a long time between two
// readings of the clock in which another process had the core (see competition.h), waits skip the yield stage for a
// while.
//
// Times are ticks of comm/base/ticks.h. A Waiter may be used by several threads, a Wait by one.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "comm/base/ticks.h"
#include <maniple/comm/deadline.h>

namespace maniple {

/// Sleeps while `word` holds `expected`, at most until the deadline. May return early (spurious wake-up).
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, Deadline deadline) noexcept;

/// Wakes all threads, of any process, that sleep on `word`.
void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept;

/// Duration of each stage. The fields differ between users; the constants do not.
struct WaitPolicy {
  using Duration = Deadline::Duration;

  Duration spin = std::chrono::microseconds(20);
  Duration yield = std::chrono::milliseconds(1);
  /// False if the ranks of a group yield to each other: then they cause most gaps themselves.
  bool detects_competition = true;

  /// The shortest gap: polls and yields take less time unless another process runs.
  static constexpr Duration kGap = std::chrono::microseconds(50);
  /// How long a gap counts as competition.
  static constexpr Duration kCompetition = std::chrono::seconds(1);
  /// The first sleep is short, because the waking thread may have missed this sleeper.
  static constexpr Duration kFirstSleep = std::chrono::microseconds(100);
  /// Sleepers poll this often, because a rank may die before it can wake them.
  static constexpr Duration kLongestSleep = std::chrono::milliseconds(50);

  // `spin_us` is MANIPLE_SPIN_US; negative: the default for this number of ranks and cores per host.

  /// For words in shared memory: `spin_us` is the spin stage.
  static WaitPolicy for_memory(int ranks, int cores, double spin_us = -1);
  /// For sockets: `spin_us` is the time before sleeping.
  static WaitPolicy for_sockets(int ranks, int cores, double spin_us = -1);
};

class Waiter {
 public:
  explicit Waiter(const WaitPolicy& policy);

  std::uint64_t yield_ticks() const noexcept { return awake_ - spin_; }
  /// Whether other processes compete for the cores, judging by the gaps seen so far.
  bool has_competition(std::uint64_t now) const noexcept {
    return now < competition_until_.load(std::memory_order_relaxed);
  }
  void set_competition(std::uint64_t now) noexcept {
    competition_until_.store(now + competition_ticks_, std::memory_order_relaxed);
  }

  /// One wait, from `start` until its condition holds.
  class Wait {
   public:
    explicit Wait(Waiter& waiter, std::uint64_t start = ticks()) noexcept
        : waiter_(&waiter), start_(start), now_(start) {}

    std::uint64_t now() const noexcept { return now_; }  ///< the last reading of the clock
    bool may_spin() const noexcept { return now_ - start_ < waiter_->spin_; }
    bool may_yield() const noexcept { return now_ - start_ < waiter_->awake_ && !waiter_->has_competition(now_); }

    /// Polls `done` a few times, then reads the clock. Returns true as soon as `done` does, without reading the clock.
    template <class Done>
    bool spin(const Done& done) {
      constexpr int kPolls = 16;
      for (int i = 0; i < kPolls; ++i) {
        if (done()) return true;
        relax();
      }
      read_clock();
      return false;
    }
    void yield() noexcept {
      ::sched_yield();
      read_clock();
    }
    /// Sleeps while `word` holds `seen`, at most until the deadline: kFirstSleep the first time, kLongestSleep
    /// afterwards.
    void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t seen, Deadline deadline) noexcept {
      const Deadline limit = Deadline::after(std::exchange(nap_, WaitPolicy::kLongestSleep));
      futex_wait(word, seen, Deadline::sooner(deadline, limit));
    }

    /// Call this between polls made outside this object. A long time since the last reading is a gap.
    void read_clock(std::uint64_t now = ticks()) noexcept {
      const std::uint64_t before = std::exchange(now_, now);
      if (now - before > waiter_->gap_) [[unlikely]]
        waiter_->note_gap(before, now);
    }
    /// Call after other work or a sleep, whose time is not a gap.
    void resume(std::uint64_t now = ticks()) noexcept { now_ = now; }

   private:
    Waiter* waiter_;
    std::uint64_t start_;
    std::uint64_t now_;
    WaitPolicy::Duration nap_ = WaitPolicy::kFirstSleep;
  };

 private:
  void note_gap(std::uint64_t from, std::uint64_t to) noexcept;

  std::uint64_t spin_;
  std::uint64_t awake_;  // spin and yield
  std::uint64_t gap_;    // maximum value: gaps are ignored
  std::uint64_t competition_ticks_;
  std::atomic<std::uint64_t> competition_until_{0};  // concurrent overwrites are harmless
};

}  // namespace maniple
