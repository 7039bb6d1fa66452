// The state of one asynchronous operation, which all copies of its Work share, and the queue that runs such operations.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/threads.h"
#include <maniple/comm/work.h>

namespace maniple {

struct detail::WorkState {
  /// Wakes those who wait and runs what was to follow, in the calling thread. Once only.
  void finish(std::exception_ptr error);
  /// One that is finished, and is never destroyed: a Work may outlive static objects.
  static WorkState* make_done();

  const std::uint32_t generation = fork_generation();
  std::atomic<bool> done{false};
  std::atomic<int> waiters{0};
  std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr error;                   // set before done
  std::vector<std::function<void()>> follow;  // run after done
};

/// A Work that is done. All of them share one state, which nobody owns: copying them counts no references.
inline Work done_work() {
  static detail::WorkState* const state = detail::WorkState::make_done();
  return Work(std::shared_ptr<detail::WorkState>(std::shared_ptr<void>(), state));
}

/// A thread that runs tasks in order; started when the first task comes.
class TaskQueue {
 public:
  TaskQueue() = default;
  ~TaskQueue();  ///< runs what is queued (which fails fast once the group is aborted), then ends
  void push(std::function<void()> task);

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace maniple
