#include "shm/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace maniple {
namespace {

// The kernel takes the word's address; it never writes through it for these two calls.
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

}  // namespace maniple
