// What a Work points to.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork_guard.h"
#include <maniple/comm/work.h>

namespace maniple {

struct Work::State {
  /// Wakes those who wait and runs what was to follow, in the calling thread. Once only.
  void finish(std::exception_ptr error);

  const std::uint32_t generation = fork_generation();
  std::atomic<bool> done{false};
  std::atomic<int> waiters{0};
  std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr error;                   // set before done
  std::vector<std::function<void()>> follow;  // run after done
};

/// A Work that is done.
inline Work done_work() {
  static const auto state = [] {
    auto done = std::make_shared<Work::State>();
    done->finish(nullptr);
    return done;
  }();
  return Work(state);
}

}  // namespace maniple
