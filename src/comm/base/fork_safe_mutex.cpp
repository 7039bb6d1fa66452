#include "comm/base/fork_safe_mutex.h"

#include <pthread.h>

#include <atomic>
#include <type_traits>

namespace maniple {

static_assert(std::is_trivially_destructible_v<ForkSafeMutex>, "the list of all keeps it until the process ends");

/// The fork handlers: fork() locks all mutexes before and unlocks them after.
struct ForkSafeMutex::Handlers {
  static inline constinit std::atomic<ForkSafeMutex*> all{nullptr};
  static inline constinit ForkSafeMutex* held =
      nullptr;  // the list when fork() locked it; written while all of its mutexes are held

  static void take() {
    ForkSafeMutex* const first = all.load(std::memory_order_acquire);
    for (ForkSafeMutex* one = first; one != nullptr; one = one->next_) one->lock();
    held = first;
  }
  static void release() {
    ForkSafeMutex* next = nullptr;
    for (ForkSafeMutex* one = held; one != nullptr; one = next) {
      next = one->next_;
      one->unlock();
    }
  }
  static void add(ForkSafeMutex* one) {
    [[maybe_unused]] static const int watched = ::pthread_atfork(&take, &release, &release);
    one->next_ = all.load(std::memory_order_relaxed);
    while (!all.compare_exchange_weak(one->next_, one, std::memory_order_acq_rel)) {
    }
  }
};

ForkSafeMutex::ForkSafeMutex() { Handlers::add(this); }

}  // namespace maniple
