#include "group/task_queue.h"

#include <pthread.h>

#include "base/group_thread.h"
#include "base/start_thread.h"

namespace maniple {

TaskQueue::~TaskQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void TaskQueue::push(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      thread_ = start_thread("the operations of a group", [this] { run(); });
      ::pthread_setname_np(thread_.native_handle(), "maniple-group");
    }
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void TaskQueue::run() {
  on_group_thread = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace maniple
