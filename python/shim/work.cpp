#include "work.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>

#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include "errors.h"

namespace maniple_torch {
namespace {

using Future = c10::ivalue::Future;
using namespace std::chrono_literals;

// ---- The timer that starts deferred operations ----------------------------------------------------------------------

class StartTimer {
 public:
  /// Never destroyed: its thread runs until the process ends.
  static StartTimer& instance() {
    static auto* timer = new StartTimer;
    return *timer;
  }

  void add(const std::shared_ptr<Engine>& engine) {
    const std::lock_guard lock(mutex_);
    std::erase_if(engines_, [](const auto& each) { return each.expired(); });
    engines_.push_back(engine);
    if (!running_) std::thread([this] { run(); }).detach();
    running_ = true;
  }

  std::vector<std::shared_ptr<Engine>> engines() {
    std::vector<std::shared_ptr<Engine>> all;
    const std::lock_guard lock(mutex_);
    for (const auto& each : engines_) {
      if (auto engine = each.lock()) all.push_back(std::move(engine));
    }
    return all;
  }

  /// Costs one system call; no other thread runs before the time has passed.
  void arm() const {
    static constexpr itimerspec kDelay{{0, 0}, {0, 100'000}};
    ::timerfd_settime(fd_, 0, &kDelay, nullptr);
  }

 private:
  void run() {
    for (std::uint64_t count = 0;;) {
      if (::read(fd_, &count, sizeof count) < 0 && errno != EINTR) return;
      for (const auto& engine : engines()) {
        std::unique_lock order(engine->order, std::try_to_lock);
        if (!order) {
          // Another thread starts an operation: check again later. If that thread runs a collective by itself, no
          // operation is deferred, and this thread must not disturb it.
          if (!engine->runs_here.load()) arm();
          continue;
        }
        if (auto work = std::move(engine->deferred)) work->start_locked();
      }
    }
  }

  const int fd_ = ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
  std::mutex mutex_;
  std::vector<std::weak_ptr<Engine>> engines_;
  bool running_ = false;
};

// ---- Threads that complete futures ----------------------------------------------------------------------------------

// A future's callback may wait for another operation of the group (PowerSGD does). So it must not run in the group's
// thread or wait for another callback; there is always a free thread.
class CallbackThreads {
 public:
  static CallbackThreads& instance() {
    static auto* threads = new CallbackThreads;
    return *threads;
  }

  void run(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() > idle_) {
      ++idle_;
      std::thread([this] { serve(); }).detach();
    }
    changed_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (!changed_.wait_for(lock, 10s, [this] { return !tasks_.empty(); })) {
        --idle_;
        return;
      }
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      --idle_;
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::size_t idle_ = 0;
};

void complete_later(c10::intrusive_ptr<Future> future, std::vector<at::Tensor> outputs, std::exception_ptr error) {
  CallbackThreads::instance().run([future = std::move(future), outputs = std::move(outputs), error] {
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  });
}

c10::intrusive_ptr<Future> make_future() {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
}

}  // namespace

int interrupted_by_signal(void* context) {
  if (Py_IsInitialized() == 0) return 0;
  const py::gil_scoped_acquire gil;
  const bool raised = PyErr_CheckSignals() != 0;
  *static_cast<bool*>(context) = raised;
  return raised ? 1 : 0;
}

void throw_python_error() {
  const py::gil_scoped_acquire gil;
  throw py::error_already_set();
}

c10::optional<std::vector<at::Tensor>> profiled_inputs(const Operation& operation) {
  if (!at::hasCallbacks() || operation.tensors.size() < operation.inputs) return {};
  std::vector<at::Tensor> inputs(operation.tensors.begin(),
                                 operation.tensors.begin() + static_cast<std::ptrdiff_t>(operation.inputs));
  std::erase_if(inputs, [](const at::Tensor& tensor) { return !tensor.defined(); });
  return inputs;
}

OperationWork::OperationWork(std::shared_ptr<Engine> engine, int rank, c10d::OpType type, const char* title,
                             Operation operation)
    : Work(rank, type, title, profiled_inputs(operation)),
      engine_(std::move(engine)),
      operation_(std::move(operation)) {
  outputs_ = operation_.outputs;
}

OperationWork::~OperationWork() { maniple_work_free(handle_); }

void OperationWork::start_locked() {
  State expected = State::deferred;
  if (!state_.compare_exchange_strong(expected, State::started)) return;
  const maniple_call call{operation_.timeout_s, nullptr, nullptr, nullptr};
  if (maniple_error* error = operation_.run(engine_->group, &call, &handle_)) return complete(error);
  c10::raw::intrusive_ptr::incref(this);  // for the callback
  maniple_work_on_done(
      handle_,
      [](void* context, maniple_error* error) {
        const auto self = c10::intrusive_ptr<OperationWork>::reclaim(static_cast<OperationWork*>(context));
        self->complete(error);
      },
      this);
}

void OperationWork::start() {
  if (!is_deferred()) return;
  const std::lock_guard lock(engine_->order);
  start_locked();
}

/// Runs the operation in this thread, if it is deferred and this thread called it. False if a signal handler raised an
/// exception.
bool OperationWork::run_here() {
  if (!is_deferred() || std::this_thread::get_id() != caller_) return true;
  const std::lock_guard lock(engine_->order);
  State expected = State::deferred;
  if (!state_.compare_exchange_strong(expected, State::started)) return true;
  bool interrupted = false;
  const maniple_call call{operation_.timeout_s, interrupted_by_signal, &interrupted, nullptr};
  if (engine_->deferred.get() == this) engine_->deferred.reset();
  engine_->runs_here.store(true);
  complete(operation_.run(engine_->group, &call, nullptr));
  engine_->runs_here.store(false);
  return !interrupted;
}

void OperationWork::complete(maniple_error* error) {
  std::exception_ptr failure = exception_of(error);
  if (!failure && operation_.finish) {
    try {
      operation_.finish();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  operation_ = {};
  finish(failure);
  c10::intrusive_ptr<Future> future;
  {
    const std::lock_guard lock(mutex_);
    future = std::move(future_);
  }
  if (future) complete_later(std::move(future), outputs_, failure);
}

bool OperationWork::isCompleted() {
  start();
  return Work::isCompleted();
}

bool OperationWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout && !run_here()) throw_python_error();
  start();
  constexpr std::chrono::milliseconds kLook = 100ms;  // interval for checking signals
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::unique_lock lock(mutex_);
  while (!cv_.wait_for(lock, kLook, [this] { return completed_; })) {
    if (timeout != kNoTimeout && std::chrono::steady_clock::now() >= end)
      throw Failure(MANIPLE_TIMEOUT, "wait: the operation is not done after " + std::to_string(timeout.count()) +
                                         " ms; it goes on, and may be waited for again");
    lock.unlock();
    bool interrupted = false;
    if (interrupted_by_signal(&interrupted) != 0) throw_python_error();
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void OperationWork::abort() {
  start();
  if (Work::isCompleted()) return;
  const std::unique_lock lock(engine_->order,
                              std::try_to_lock);  // held by others: by one of its operations, and so it is there
  if (engine_->group != nullptr) maniple_group_abort(engine_->group, "aborted by Work.abort()");
}

int OperationWork::sourceRank() const { return handle_ == nullptr ? -1 : maniple_work_source(handle_); }

c10::intrusive_ptr<Future> OperationWork::getFuture() {
  c10::intrusive_ptr<Future> future = make_future();
  bool completed = false;
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    completed = completed_;
    if (!completed) future_ = future;
  }
  if (completed && exception_) future->setError(exception_);
  if (completed && !exception_) future->markCompleted(c10::IValue(outputs_));
  start();
  return future;
}

void post(const std::shared_ptr<Engine>& engine, const c10::intrusive_ptr<OperationWork>& work, bool defer) {
  const std::lock_guard lock(engine->order);
  if (auto before = std::move(engine->deferred)) before->start_locked();
  if (defer) {
    engine->deferred = work;
    StartTimer::instance().arm();
  } else {
    work->start_locked();
  }
}

void flush(Engine& engine) {
  const std::lock_guard lock(engine.order);
  if (auto before = std::move(engine.deferred)) before->start_locked();
}

void watch(const std::shared_ptr<Engine>& engine) { StartTimer::instance().add(engine); }

void leave(Engine& engine) {
  maniple_group* group = nullptr;
  {
    const std::lock_guard lock(engine.order);
    if (auto before = std::move(engine.deferred)) before->start_locked();
    group = std::exchange(engine.group, nullptr);
  }
  maniple_group_free(group);
}

void leave_all() {
  for (const auto& engine : StartTimer::instance().engines()) leave(*engine);
}

// ---- Combined works -------------------------------------------------------------------------------------------------

namespace {

class CombinedWork : public c10d::Work {
 public:
  CombinedWork(int rank, std::vector<c10::intrusive_ptr<Work>> works) : Work(rank), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      for (const at::Tensor& tensor : work->result()) all.push_back(tensor);
    }
    return all;
  }

  c10::intrusive_ptr<Future> getFuture() override {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    const std::vector<at::Tensor> results = result();
    for (const at::Tensor& tensor : results) {
      if (tensor.is_cpu()) continue;
      // On a GPU the host does not wait: the current stream waits for all works, and the future completes on that
      // stream.
      for (const auto& work : works_) work->wait();
      future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                            std::vector<at::Device>{tensor.device()});
      future_->markCompleted(c10::IValue(results));
      return future_;
    }
    future_ = make_future();
    if (works_.empty()) future_->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    struct Rest {
      std::atomic<std::size_t> count;
      std::atomic<bool> failed{false};
    };
    auto rest = std::make_shared<Rest>();
    rest->count = works_.size();
    for (const auto& work : works_) {
      work->getFuture()->addCallback([rest, results, future = future_](Future& one) {
        if (one.hasError() && !rest->failed.exchange(true)) future->setError(one.exception_ptr());
        if (rest->count.fetch_sub(1) == 1 && !rest->failed) future->markCompleted(c10::IValue(results));
      });
    }
    return future_;
  }

 private:
  std::vector<c10::intrusive_ptr<Work>> works_;
  c10::intrusive_ptr<Future> future_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> combine(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  return c10::make_intrusive<CombinedWork>(rank, std::move(works));
}

}  // namespace maniple_torch
