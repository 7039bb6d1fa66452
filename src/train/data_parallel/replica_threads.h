// The threads of the replicas, which run with the caller's settings.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <torch/torch.h>

#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"

namespace maniple {

/// Persistent threads: thread i always runs part i of a task.
class Workers {
 public:
  using Task = std::function<void(std::size_t part)>;

  explicit Workers(std::size_t count);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  std::size_t size() const noexcept { return threads_.size(); }
  /// Whether the caller is one of the threads.
  bool inside() const noexcept;

  /// Runs the parts 0 .. parts-1 concurrently and waits for all. Returns the exception that each part threw, or null.
  /// Concurrent callers take turns; a part must not call this.
  std::vector<std::exception_ptr> run(std::size_t parts, const Task& task);

 private:
  void work(std::size_t index);
  void close() noexcept;

  Mutex turn_;  // serialises the callers
  Mutex mutex_;
  CondVar begin_, end_;
  std::uint64_t round_ MANIPLE_GUARDED_BY(mutex_) = 0;
  const Task* task_ MANIPLE_GUARDED_BY(mutex_) = nullptr;
  std::size_t parts_ MANIPLE_GUARDED_BY(mutex_) = 0;
  std::size_t running_ MANIPLE_GUARDED_BY(mutex_) = 0;
  bool closing_ MANIPLE_GUARDED_BY(mutex_) = false;
  std::vector<std::exception_ptr> thrown_ MANIPLE_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // the last member: the threads use all others
};

class ReplicaThreads {
 public:
  /// `threads`: see DataParallelOptions.
  ReplicaThreads(std::vector<torch::Device> devices, int threads);
  ~ReplicaThreads();

  std::size_t size() const noexcept { return devices_.size(); }
  torch::Device device(std::size_t replica) const { return devices_[replica]; }

  /// Throws InvalidArgument when called in a replica's thread, which would wait for itself.
  void require_outside() const;

  /// Whether the caller is one of the threads.
  bool inside() const noexcept { return workers_->inside(); }

  /// Runs task(0) .. task(count-1), each in its replica's thread, with its device current and the caller's settings,
  /// and waits for all. Returns the exception that each threw, or null.
  std::vector<std::exception_ptr> run(std::size_t count, const Workers::Task& task);
  /// The same, but throws the first exception, by replica number, as ReplicaError; `what` names the operation that
  /// failed.
  void run(std::size_t count, const char* what, const Workers::Task& task);

 private:
  int intra_op_threads() const;

  std::vector<torch::Device> devices_;
  int threads_;
  std::unique_ptr<Workers> workers_;
  ForkGuard guard_;
};

}  // namespace maniple
