#include "train/data_parallel/replica_threads.h"

#include <pthread.h>

#include <algorithm>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>

#include "comm/base/check.h"
#include "comm/base/mutex.h"
#include "train/open_blas.h"
#include "train/tensor/exception_text.h"
#include "train/tensor/torch_compat.h"
#include <maniple/train/data_parallel.h>

namespace maniple {
namespace {

// A replica's thread computes with the settings of the calling thread, but with a share of its intra-op threads.

/// The calling thread's settings: grad mode, inference mode, autocast, profiling.
class CallerSettings {
 public:
  /// Applies the caller's settings to this thread, which must be a replica's, during the scope's lifetime.
  class Scope {
   public:
    explicit Scope(const CallerSettings& settings) : guard_(settings.state_) {
      set_autocast_dtype(torch::kCPU, settings.cpu_dtype_);
      set_autocast_dtype(torch::kCUDA, settings.cuda_dtype_);
    }

   private:
    at::ThreadLocalStateGuard guard_;
  };

 private:
  at::ThreadLocalState state_;
  torch::ScalarType cpu_dtype_ = autocast_dtype(torch::kCPU), cuda_dtype_ = autocast_dtype(torch::kCUDA);
};

/// Operations of this thread use `threads` threads from now on; other threads are unaffected. (at::set_num_threads
/// would also affect threads that do not exist yet.)
void use_intra_op_threads(int threads);

/// During its lifetime, OpenBLAS uses at most `threads` threads for an operation. OpenBLAS's own threads serve one
/// operation at a time, so two replicas that multiply matrices concurrently would wait for each other. The setting
/// belongs to the process: the end of the last scope restores it. Does nothing if OpenBLAS multiplies matrices with
/// OpenMP threads (see above) or in the calling thread.
class BlasThreads {
 public:
  explicit BlasThreads(int threads);
  ~BlasThreads();
  BlasThreads(const BlasThreads&) = delete;
  BlasThreads& operator=(const BlasThreads&) = delete;
};

ForkSafeMutex blas_mutex;
int blas_scopes MANIPLE_GUARDED_BY(blas_mutex) = 0, blas_threads_before MANIPLE_GUARDED_BY(blas_mutex) = 0;

void use_intra_op_threads(int threads) {
  thread_local int current = 0;
  if (current == threads) return;
  at::get_num_threads();  // a thread's first operation sets the process-wide number; get that done first
  static auto* const openmp = loaded_function<void(int)>("omp_set_num_threads");
  static auto* const mkl = loaded_function<int(int)>("MKL_Set_Num_Threads_Local");
  if (openmp != nullptr) openmp(threads);
  if (mkl != nullptr) mkl(threads);
  current = threads;
}

BlasThreads::BlasThreads(int threads) {
  if (!open_blas().has_threads()) return;
  const MutexLock lock(blas_mutex);
  if (blas_scopes++ == 0) blas_threads_before = open_blas().get();
  open_blas().set(std::min(threads, blas_threads_before));
}

BlasThreads::~BlasThreads() {
  if (!open_blas().has_threads()) return;
  const MutexLock lock(blas_mutex);
  if (--blas_scopes == 0) open_blas().set(blas_threads_before);
}

thread_local const Workers* owner = nullptr;  // the owner of this thread; null for other threads

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

// ---- Workers --------------------------------------------------------------------------------------------------------

Workers::Workers(std::size_t count) {
  threads_.reserve(count);
  try {
    for (std::size_t i = 0; i < count; ++i) {
      threads_.emplace_back([this, i] { work(i); });
      ::pthread_setname_np(threads_.back().native_handle(), format_text("replica-{}", i).c_str());
    }
  } catch (...) {  // too many threads for the system
    close();
    throw;
  }
}

Workers::~Workers() { close(); }

void Workers::close() noexcept {
  {
    const MutexLock lock(mutex_);
    closing_ = true;
  }
  begin_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool Workers::inside() const noexcept { return owner == this; }

std::vector<std::exception_ptr> Workers::run(std::size_t parts, const Task& task) {
  MANIPLE_ASSERT(!inside() && parts <= size());
  const MutexLock turn(turn_);
  MutexLock lock(mutex_);
  task_ = &task;
  parts_ = running_ = parts;
  thrown_.assign(parts, nullptr);
  ++round_;
  begin_.notify_all();
  end_.wait(lock, [&]() MANIPLE_REQUIRES(mutex_) { return running_ == 0; });
  task_ = nullptr;
  return std::move(thrown_);
}

void Workers::work(std::size_t index) {
  owner = this;
  std::uint64_t seen = 0;
  MutexLock lock(mutex_);
  for (;;) {
    begin_.wait(lock, [&]() MANIPLE_REQUIRES(mutex_) { return closing_ || round_ != seen; });
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

// ---- ReplicaThreads -------------------------------------------------------------------------------------------------

ReplicaThreads::ReplicaThreads(std::vector<torch::Device> devices, int threads)
    : devices_(std::move(devices)), threads_(threads), workers_(std::make_unique<Workers>(devices_.size())) {}

ReplicaThreads::~ReplicaThreads() {
  if (!guard_.owned()) abandon(workers_);
}

int ReplicaThreads::intra_op_threads() const {
  if (threads_ > 0) return threads_;
  const auto on_cpu = std::count_if(devices_.begin(), devices_.end(), [](torch::Device one) { return one.is_cpu(); });
  return std::max(1, at::get_num_threads() / static_cast<int>(std::max<std::ptrdiff_t>(1, on_cpu)));
}

void ReplicaThreads::require_outside() const {
  MANIPLE_REQUIRE(!workers_->inside(), "DataParallel: a replica's forward calls the DataParallel that it belongs to");
}

std::vector<std::exception_ptr> ReplicaThreads::run(std::size_t count, const Workers::Task& task) {
  const CallerSettings settings;
  const int threads = intra_op_threads();
  const BlasThreads blas(threads);
  if (!guard_.owned())
    throw Aborted("DataParallel: a child of fork() has no threads of replicas; make one in the child");
  return workers_->run(count, [&](std::size_t i) {
    use_intra_op_threads(threads);
    const CallerSettings::Scope scope(settings);
    const c10::DeviceGuard device(devices_[i]);
    task(i);
  });
}

void ReplicaThreads::run(std::size_t count, const char* what, const Workers::Task& task) {
  const auto thrown = run(count, task);
  const auto failed = [](const std::exception_ptr& one) { return one != nullptr; };
  const auto first = std::find_if(thrown.begin(), thrown.end(), failed);
  if (first == thrown.end()) return;
  const std::size_t index = first - thrown.begin();
  const auto more = std::count_if(first + 1, thrown.end(), failed);
  throw_with_cause(*first,
                   ReplicaError(kind_of(*first),
                                format_text("DataParallel: replica {} of {}, on {}, failed in {}: {}{}", index,
                                            devices_.size(), devices_[index].str(), what, exception_text(*first),
                                            more > 0 ? format_text(" (and {} more)", more) : ""),
                                index, devices_[index]));
}

}  // namespace maniple
