#include <torch/torch.h>

#include <dlfcn.h>

#include <deque>
#include <thread>

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/base/check.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include "comm/base/system_error.h"
#include <maniple/train/batch_source.h>

namespace maniple::detail {

MemoryPinning::MemoryPinning(bool asked) {
  if (asked && torch::cuda::is_available()) device_ = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
}

std::vector<torch::Tensor> MemoryPinning::pinned(std::vector<torch::Tensor> tensors) const {
  const c10::DeviceGuard guard(*device_);  // otherwise our thread would create a context on the first device
  for (torch::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.device().is_cpu()) tensor = tensor.pin_memory();
  }
  return tensors;
}

namespace {

/// Operations of this thread use no other threads, since workers are threads already. (at::set_num_threads would also
/// affect threads that do not exist yet, such as the threads of backward.)
void compute_alone() {
  at::get_num_threads();  // a thread's first operation sets the process-wide number; get that done first
  using SetThreads = void(int);
  if (auto* set = reinterpret_cast<SetThreads*>(::dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
}

}  // namespace

struct BatchThreads::Impl {
  struct Slot {
    BatchTask task = {};
    std::shared_ptr<void> batch = nullptr;
    std::exception_ptr error = nullptr;
    bool done = false;
  };

  Impl(const LoaderOptions& given, std::shared_ptr<BatchSource> given_source, Make given_make)
      : options(given),
        source(std::move(given_source)),
        make(std::move(given_make)),
        most(options.workers * options.prefetch) {
    try {
      for (std::size_t i = 0; i < options.workers; ++i) threads.emplace_back([this, i] { work(i); });
      if (options.workers > 0 && source->is_slow()) threads.emplace_back([this] { read_ahead(); });
    } catch (const std::system_error& error) {
      end();
      throw_system_error(format_text("DataLoader: cannot start {} workers", options.workers), error.code().value());
    }
  }
  ~Impl() { end(); }

  void end() {
    {
      const MutexLock lock(mutex);
      stop = true;
    }
    has_task.notify_all();
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  void work(std::size_t worker) {
    compute_alone();
    MutexLock lock(mutex);
    for (;;) {
      has_task.wait(lock, [&]() MANIPLE_REQUIRES(mutex) { return stop || !waiting.empty(); });
      if (stop) return;
      const auto slot = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      try {
        slot->batch = make(worker, slot->task, stop);
      } catch (...) {
        slot->error = std::current_exception();
      }
      slot->task = {};
      lock.lock();
      slot->done = true;
      changed.notify_all();
    }
  }

  /// The thread that reads the files of a stream.
  void read_ahead() {
    MutexLock lock(mutex);
    while (!stop && !fed) {
      changed.wait(lock, [&]() MANIPLE_REQUIRES(mutex) { return stop || slots.size() < most; });
      if (stop) return;
      lock.unlock();
      auto slot = next_slot();
      lock.lock();
      add(std::move(slot));
    }
  }

  /// Null if there are no more tasks.
  std::shared_ptr<Slot> next_slot() {
    auto slot = std::make_shared<Slot>();
    try {
      auto task = source->next();
      if (!task) return nullptr;
      slot->task = std::move(*task);
    } catch (...) {
      slot->error = std::current_exception();
      slot->done = true;
    }
    return slot;
  }

  void add(std::shared_ptr<Slot> slot) MANIPLE_REQUIRES(mutex) {
    fed = slot == nullptr || slot->error != nullptr;
    if (slot != nullptr) {
      slots.push_back(slot);
      if (!slot->done) waiting.push_back(std::move(slot));
    }
    has_task.notify_one();
    changed.notify_all();
  }

  void top_up() MANIPLE_REQUIRES(mutex) {
    while (!source->is_slow() && !fed && slots.size() < most) add(next_slot());
  }

  std::shared_ptr<void> next() {
    if (!threads.empty() && !guard.owned())
      throw Aborted("DataLoader: a child of fork() has no workers; make a DataLoader in the child");
    std::shared_ptr<Slot> slot;
    if (options.workers == 0) {
      slot = next_slot();
      if (slot == nullptr) return nullptr;
      if (slot->error == nullptr) return make(0, slot->task, stop);
    } else {
      MutexLock lock(mutex);
      top_up();
      changed.wait(lock, [&]() MANIPLE_REQUIRES(mutex) { return slots.empty() ? fed : slots.front()->done; });
      if (slots.empty()) return nullptr;
      slot = std::move(slots.front());
      slots.pop_front();
      top_up();
      changed.notify_all();
    }
    if (slot->error != nullptr) std::rethrow_exception(slot->error);
    return std::move(slot->batch);
  }

  const LoaderOptions options;
  const std::shared_ptr<BatchSource> source;
  const Make make;
  const std::size_t most;  ///< max batches held or being made
  Mutex mutex;
  CondVar has_task;  ///< signals workers
  CondVar changed;   ///< signals the loop and the reading thread
  /// Batches in the order of the data; next() takes the first.
  std::deque<std::shared_ptr<Slot>> slots MANIPLE_GUARDED_BY(mutex);
  std::deque<std::shared_ptr<Slot>> waiting MANIPLE_GUARDED_BY(mutex);  ///< slots that no worker has taken
  bool fed MANIPLE_GUARDED_BY(mutex) = false;                           ///< there are no more tasks
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  ForkGuard guard;
};

BatchThreads::BatchThreads(const LoaderOptions& options, std::shared_ptr<BatchSource> source, Make make)
    : impl_(std::make_unique<Impl>(options, std::move(source), std::move(make))) {}
BatchThreads::~BatchThreads() {
  if (!impl_->guard.owned()) abandon(impl_);
}
std::shared_ptr<void> BatchThreads::next() { return impl_->next(); }

}  // namespace maniple::detail
