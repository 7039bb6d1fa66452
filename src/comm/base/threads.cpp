#include "comm/base/threads.h"

#include <chrono>
#include <cstdlib>

#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"

namespace maniple {
namespace {

/// The threads that run_apart has started in this process.
struct Apart {
  Mutex mutex;
  CondVar ended;
  int running MANIPLE_GUARDED_BY(mutex) = 0;
};

constinit ProcessWide<Apart> apart;

void await_apart() {
  constexpr auto kMax = std::chrono::seconds(5);
  Apart& all = *apart;
  MutexLock lock(all.mutex);
  all.ended.wait_for(lock, kMax, [&]() MANIPLE_REQUIRES(all.mutex) { return all.running == 0; });
}

}  // namespace

void await_apart_at_exit() noexcept { std::atexit(await_apart); }

bool run_apart(std::function<void()> work) noexcept {
  static const bool kAwaited = (await_apart_at_exit(), true);
  (void)kAwaited;
  const auto count = [](int more) {
    Apart& all = *apart;
    const MutexLock lock(all.mutex);
    all.running += more;
    all.ended.notify_all();
  };
  count(1);
  try {
    std::thread([work = std::move(work), count]() mutable {
      work();
      work = nullptr;  // destroys its captures before it counts as done
      count(-1);
    }).detach();
    return true;
  } catch (const std::system_error&) {
    count(-1);
    return false;
  }
}

}  // namespace maniple
