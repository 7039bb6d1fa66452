#include "train/data_parallel/replica_threads.h"

#include <pthread.h>

#include <algorithm>

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#include "base/check.h"
#include "train/data_parallel/thread_settings.h"
#include <maniple/train/data_parallel.h>

namespace maniple {
namespace {

thread_local const Workers* owner = nullptr;  // whose thread this is

std::string text_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

ErrorKind kind_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error.kind();
  } catch (...) {
    return ErrorKind::aborted;
  }
}

[[noreturn]] void throw_with_cause(const std::exception_ptr& cause, const ReplicaError& error) {
  try {
    std::rethrow_exception(cause);
  } catch (...) {
    std::throw_with_nested(error);
  }
}

}  // namespace

// ---- Workers ---------------------------------------------------------------------------------------------------------

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

// ---- ReplicaThreads --------------------------------------------------------------------------------------------------

ReplicaThreads::ReplicaThreads(std::vector<torch::Device> devices, int threads)
    : devices_(std::move(devices)), threads_(threads), workers_(devices_.size()) {}

int ReplicaThreads::intra_op_threads() const {
  if (threads_ > 0) return threads_;
  const auto on_cpu = std::count_if(devices_.begin(), devices_.end(), [](torch::Device one) { return one.is_cpu(); });
  return std::max(1, at::get_num_threads() / static_cast<int>(std::max<std::ptrdiff_t>(1, on_cpu)));
}

void ReplicaThreads::require_outside() const {
  MANIPLE_REQUIRE(!workers_.inside(), "DataParallel: a replica's forward calls the DataParallel that it belongs to");
}

void ReplicaThreads::run(std::size_t count, const char* what, const Workers::Task& task) {
  const CallerSettings settings;
  const int threads = intra_op_threads();
  const BlasThreads blas(threads);
  const auto thrown = workers_.run(count, [&](std::size_t i) {
    use_intra_op_threads(threads);
    const CallerSettings::Scope scope(settings);
    const c10::DeviceGuard device(devices_[i]);
    task(i);
  });
  const auto failed = [](const std::exception_ptr& one) { return one != nullptr; };
  const auto first = std::find_if(thrown.begin(), thrown.end(), failed);
  if (first == thrown.end()) return;
  const auto index = static_cast<std::size_t>(first - thrown.begin());
  const auto more = std::count_if(first + 1, thrown.end(), failed);
  throw_with_cause(*first, ReplicaError(kind_of(*first),
                                        format_text("DataParallel: replica {} of {}, on {}, failed in {}: {}{}", index,
                                                    devices_.size(), devices_[index].str(), what, text_of(*first),
                                                    more > 0 ? format_text(" (and {} more)", more) : ""),
                                        index, devices_[index]));
}

}  // namespace maniple
