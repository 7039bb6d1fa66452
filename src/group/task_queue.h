// A thread that runs tasks in order; started when the first task comes.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace maniple {

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
