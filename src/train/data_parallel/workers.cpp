#include "train/data_parallel/workers.h"

#include <pthread.h>

#include "base/check.h"

namespace maniple {
namespace {

thread_local const Workers* owner = nullptr;  // whose thread this is

}  // namespace

Workers::Workers(std::size_t count) {
  threads_.reserve(count);
  try {
    for (std::size_t i = 0; i < count; ++i) {
      threads_.emplace_back([this, i] { work(i); });
      ::pthread_setname_np(threads_.back().native_handle(), format_text("replica-{}", i).c_str());
    }
  } catch (...) {  // too many threads
    close();
    throw;
  }
}

Workers::~Workers() { close(); }

void Workers::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  begin_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool Workers::inside() const noexcept { return owner == this; }

std::vector<std::exception_ptr> Workers::run(std::size_t parts, const Task& task) {
  MANIPLE_ASSERT(!inside() && parts <= size());
  const std::lock_guard turn(turn_);
  std::unique_lock lock(mutex_);
  task_ = &task;
  parts_ = running_ = parts;
  thrown_.assign(parts, nullptr);
  ++round_;
  begin_.notify_all();
  end_.wait(lock, [&] { return running_ == 0; });
  task_ = nullptr;
  return std::move(thrown_);
}

void Workers::work(std::size_t index) {
  owner = this;
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    begin_.wait(lock, [&] { return closing_ || round_ != seen; });
    if (closing_) return;
    seen = round_;
    if (index >= parts_) continue;
    const Task& task = *task_;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      task(index);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    thrown_[index] = std::move(thrown);
    if (--running_ == 0) end_.notify_one();
  }
}

}  // namespace maniple
