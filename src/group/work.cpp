#include <maniple/comm/work.h>

#include <pthread.h>

#include "base/check.h"
#include "base/threads.h"
#include "group/work_state.h"

namespace maniple {
namespace {

struct WaiterCount {
  std::atomic<int>& waiters;
  explicit WaiterCount(std::atomic<int>& count) : waiters(count) { ++waiters; }
  ~WaiterCount() { --waiters; }
};

}  // namespace

detail::WorkState* detail::WorkState::make_done() {
  auto* done = new WorkState;
  done->finish(nullptr);
  return done;
}

void detail::WorkState::finish(std::exception_ptr cause) {
  std::vector<std::function<void()>> next;
  {
    const std::lock_guard lock(mutex);
    error = std::move(cause);
    done.store(true, std::memory_order_release);
    next = std::move(follow);
  }
  changed.notify_all();
  for (const auto& callback : next) callback();
}

bool Work::done() const {
  MANIPLE_REQUIRE(state_ != nullptr, "this Work is a handle to nothing");
  return state_->done.load(std::memory_order_acquire);
}

void Work::wait() const { wait_until(Deadline::never()); }

bool Work::wait_until(Deadline deadline) const {
  if (!done()) {
    // The thread that would finish it is the parent's.
    if (fork_generation() != state_->generation) {
      throw Aborted("a child of fork() cannot wait for what its parent started");
    }
    const WaiterCount count{state_->waiters};
    std::unique_lock lock(state_->mutex);
    const auto is_done = [this] { return state_->done.load(std::memory_order_acquire); };
    if (deadline.is_never()) {
      state_->changed.wait(lock, is_done);
    } else if (!state_->changed.wait_until(lock, deadline.when(), is_done)) {
      return false;
    }
  }
  if (state_->error) std::rethrow_exception(state_->error);
  return true;
}

std::exception_ptr Work::error() const { return done() ? state_->error : nullptr; }

Work Work::then(std::function<void()> next) const {
  MANIPLE_REQUIRE(state_ != nullptr, "this Work is a handle to nothing");
  auto following = std::make_shared<detail::WorkState>();
  auto run = [state = state_.get(), following, next = std::move(next)] {
    std::exception_ptr error = state->error;
    if (!error) {
      try {
        next();
      } catch (...) {
        error = std::current_exception();
      }
    }
    following->finish(std::move(error));
  };
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->done.load(std::memory_order_acquire)) {
      state_->follow.push_back(std::move(run));
      return Work(following);
    }
  }
  run();
  return Work(following);
}

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
