#include "base/threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>

namespace maniple {
namespace {

std::atomic<std::uint32_t> generation{0};

/// What run_apart has started in this process.
struct Apart {
  std::mutex mutex;
  std::condition_variable ended;
  int running = 0;
};

/// For ever: such a thread may be there until the process is gone.
union ApartForEver {
  ApartForEver() { new (&it) Apart; }
  ~ApartForEver() {}
  Apart it;
} apart;

void await_apart() {
  constexpr auto kMost = std::chrono::seconds(5);
  std::unique_lock lock(apart.it.mutex);
  apart.it.ended.wait_for(lock, kMost, [] { return apart.it.running == 0; });
}

bool watch() noexcept {
  ::pthread_atfork(nullptr, nullptr, [] {
    generation.fetch_add(1, std::memory_order_relaxed);
    new (&apart.it) Apart;  // those threads are the parent's
  });
  return true;
}

const bool kWatching = watch();

}  // namespace

void await_apart_at_exit() noexcept { std::atexit(await_apart); }

bool run_apart(std::function<void()> work) noexcept {
  static const bool kAwaited = (await_apart_at_exit(), true);
  (void)kAwaited;
  const auto count = [](int more) {
    const std::lock_guard lock(apart.it.mutex);
    apart.it.running += more;
    apart.it.ended.notify_all();
  };
  count(1);
  try {
    std::thread([work = std::move(work), count]() mutable {
      work();
      work = nullptr;  // what it holds is gone when it is done
      count(-1);
    }).detach();
    return true;
  } catch (const std::system_error&) {
    count(-1);
    return false;
  }
}

std::uint32_t fork_generation() noexcept {
  (void)kWatching;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace maniple
