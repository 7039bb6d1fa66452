// The c10d::Work of an operation, and the time at which an operation starts.
//
// torch.distributed calls a backend and then waits for the Work; the backend does not know whether the wait follows at
// once. Passing each operation to another thread would cost two thread switches, more than a small operation takes. So
// a small operation is *deferred*: if wait() follows within microseconds, the calling thread runs the operation itself.
// Otherwise the operation starts in the group's thread, triggered by a timer, by the group's next operation, or by a
// query of its future or state. Operations always run in the order of the calls.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/Optional.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <maniple/c.h>

namespace maniple_torch {

class OperationWork;

/// A Maniple group, and the order in which its operations start. Shared by the backend, which owns the group, and its
/// operations.
struct Engine {
  std::mutex order;                              ///< held to start a collective, or to run one in the calling thread
  std::atomic<bool> runs_here{false};            ///< `order` is held by a thread that runs a collective by itself
  maniple_group* group = nullptr;                ///< null once the backend is gone; guarded by order
  c10::intrusive_ptr<OperationWork> deferred{};  ///< the last call, if it may still be deferred; guarded by order
  std::atomic<int> gpu{-1};                      ///< the GPU of the latest operation; -1: none yet
};

/// One operation: how to run it (synchronously if the work is null) and how to process its result.
struct Operation {
  std::function<maniple_error*(maniple_group*, const maniple_call*, maniple_work**)> run;
  std::function<void()> finish =
      {};  ///< called after success and before completion is visible: copies results to their destination
  std::vector<at::Tensor> tensors = {};  ///< kept alive until the operation is done
  std::size_t inputs = 1;                ///< number of leading `tensors` that are inputs, for the profiler
  std::vector<at::Tensor> outputs = {};  ///< the future's value
  double timeout_s = 0;                  ///< 0: the group's time limit
};

class OperationWork : public c10d::Work {
 public:
  OperationWork(std::shared_ptr<Engine> engine, int rank, c10d::OpType type, const char* title, Operation operation);
  ~OperationWork() override;

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Starts the operation if it is deferred. The caller holds the engine's `order`, except for messages, which are not
  /// ordered.
  void start_locked();
  bool is_deferred() const { return state_.load(std::memory_order_acquire) == State::deferred; }

 private:
  enum class State { deferred, started };
  void start();
  bool run_here();
  void complete(maniple_error* error);

  const std::shared_ptr<Engine> engine_;
  Operation operation_;  // cleared when it is done
  std::vector<at::Tensor> outputs_;
  const std::thread::id caller_ = std::this_thread::get_id();
  std::atomic<State> state_{State::deferred};
  maniple_work* handle_ = nullptr;
  c10::intrusive_ptr<c10::ivalue::Future> future_ = {};  // guarded by mutex_
};

/// For the constructor of a Work: the inputs, whose shapes PyTorch's profiler shows. Empty unless profiling is on.
c10::optional<std::vector<at::Tensor>> profiled_inputs(const Operation& operation);

// C-level signal handlers of Python only record signals, so long waits must run the Python handlers.

/// The interrupt callback of a maniple_call, whose context is a bool. Runs Python's handlers. If one raised an
/// exception, which is then Python's current error, sets the bool and returns 1. Handlers run only in the main thread.
int interrupted_by_signal(void* context);
/// Throws Python's current error.
[[noreturn]] void throw_python_error();

/// Calls a collective after the earlier ones, at once or deferred.
void post(const std::shared_ptr<Engine>& engine, const c10::intrusive_ptr<OperationWork>& work, bool defer);
/// Call once per engine: lets a timer start its deferred operation.
void watch(const std::shared_ptr<Engine>& engine);
/// Starts the deferred operation, if any.
void flush(Engine& engine);
/// Removes the group from the engine and leaves it. Running operations fail.
void leave(Engine& engine);
/// Leaves all groups when the interpreter ends, before objects that their threads use (OpenSSL's, for instance) are
/// destroyed.
void leave_all();

/// Combines several works into one, for coalesced calls.
c10::intrusive_ptr<c10d::Work> combine(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace maniple_torch
