#include "comm/shm/waiter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <limits>

#include "comm/shm/competition.h"

namespace maniple {
namespace {

WaitPolicy::Duration duration_of_us(double us) {
  return std::chrono::duration_cast<WaitPolicy::Duration>(std::chrono::duration<double, std::micro>(us));
}

double in_seconds(std::uint64_t ticks) noexcept { return static_cast<double>(ticks) / ticks_per_second(); }

std::uint64_t in_ticks(WaitPolicy::Duration duration) {
  return static_cast<std::uint64_t>(std::chrono::duration<double>(duration).count() * ticks_per_second());
}

// The kernel needs a non-const address; it does not write through it in these two calls.
std::uint32_t* address_of(const std::atomic<std::uint32_t>& word) noexcept {
  static_assert(sizeof(std::atomic<std::uint32_t>) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);
  return reinterpret_cast<std::uint32_t*>(const_cast<std::atomic<std::uint32_t>*>(&word));
}

}  // namespace

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, Deadline deadline) noexcept {
  timespec limit{};
  timespec* limit_ptr = nullptr;
  if (!deadline.is_never()) {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.remaining()).count();
    if (left <= 0) return;
    limit.tv_sec = static_cast<time_t>(left / 1'000'000'000);
    limit.tv_nsec = static_cast<long>(left % 1'000'000'000);
    limit_ptr = &limit;
  }
  ::syscall(SYS_futex, address_of(word), FUTEX_WAIT, expected, limit_ptr, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, address_of(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

WaitPolicy WaitPolicy::for_memory(int ranks, int cores, double spin_us) {
  WaitPolicy policy;
  const bool crowded = ranks > cores;
  if (crowded) policy.spin = {};  // the awaited rank may need this core
  if (spin_us >= 0) policy.spin = duration_of_us(spin_us);
  // Beyond this number, yielding ranks only keep the cores from ranks that have not arrived yet: without yielding, 256
  // ranks on two cores need half the time for a barrier, and 1.5 s instead of 2.1 s to start.
  constexpr int kMaxYielding = 16;  // ranks per core
  if (ranks > kMaxYielding * cores) policy.yield = {};
  policy.detects_competition = !crowded;
  return policy;
}

WaitPolicy WaitPolicy::for_sockets(int ranks, int cores, double spin_us) {
  WaitPolicy policy;
  const Duration awake = spin_us >= 0 ? duration_of_us(spin_us) : ranks > cores ? policy.spin : policy.yield;
  policy.spin = std::min(policy.spin, awake);
  policy.yield = awake - policy.spin;
  return policy;
}

Waiter::Waiter(const WaitPolicy& policy)
    : spin_(in_ticks(policy.spin)),
      awake_(in_ticks(policy.spin + policy.yield)),
      gap_(policy.detects_competition ? in_ticks(WaitPolicy::kGap) : std::numeric_limits<std::uint64_t>::max()),
      competition_ticks_(in_ticks(WaitPolicy::kCompetition)) {}

void Waiter::note_gap(std::uint64_t from, std::uint64_t to) noexcept {
  if (Competition::is_in_gap_of_thread(in_seconds(from), in_seconds(to))) set_competition(to);
}

}  // namespace maniple
