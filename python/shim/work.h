// The c10d::Work of an operation, and when an operation starts.
//
// torch.distributed calls a backend and then waits for the Work, and the backend is not told whether that wait follows
// at once. Handing each operation to another thread costs two changes of threads, more than a small one takes by
// itself. So a small operation is *deferred*: whoever called it runs it in wait(), in its own thread, if that comes
// within microseconds. Otherwise it is started in the group's thread: by a timer, by the next operation of the group,
// or by a question for its future or its state. The order of operations is that of the calls in any case.
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

/// A group of Maniple, and the order in which its operations start. Shared by the backend, which owns the group, and
/// its operations.
struct Engine {
  std::mutex order;                              ///< held by whoever starts a collective, or runs one in its own thread
  std::atomic<bool> runs_here{false};            ///< `order` is held by a thread that runs a collective by itself
  maniple_group* group = nullptr;                ///< null once the backend is gone; guarded by order
  c10::intrusive_ptr<OperationWork> deferred{};  ///< the last call, if it may still be deferred; guarded by order
  std::atomic<int> gpu{-1};                      ///< the one whose tensors came last; -1: none did
};

/// One operation: how to run it (without a work: now) and what to do with its result.
struct Operation {
  std::function<maniple_error*(maniple_group*, const maniple_call*, maniple_work**)> run;
  std::function<void()> finish =
      {};  ///< after success, before anyone learns of it: copies results to where they belong
  std::vector<at::Tensor> tensors = {};  ///< kept alive until it is done
  std::size_t inputs = 1;                ///< so many of the first of them are inputs, for the profiler
  std::vector<at::Tensor> outputs = {};  ///< the value of the future
  double timeout_s = 0;                  ///< 0: that of the group
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

  /// Starts it if it is deferred. `order` of the engine is held, except for messages, which have no place in it.
  void start_locked();
  bool is_deferred() const { return state_.load(std::memory_order_acquire) == State::deferred; }

 private:
  enum class State { deferred, started };
  void start();
  bool run_here();
  void complete(maniple_error* error);

  const std::shared_ptr<Engine> engine_;
  Operation operation_;  // until it is done
  std::vector<at::Tensor> outputs_;
  const std::thread::id caller_ = std::this_thread::get_id();
  std::atomic<State> state_{State::deferred};
  maniple_work* handle_ = nullptr;
  c10::intrusive_ptr<c10::ivalue::Future> future_ = {};  // guarded by mutex_
};

/// For the constructor of a Work: the inputs, whose shapes PyTorch's profiler shows. Nothing where nobody profiles.
c10::optional<std::vector<at::Tensor>> profiled_inputs(const Operation& operation);

// Python's handlers of signals only note them; whoever waits for long lets them run.

/// As the question of a maniple_call, whose context is a bool: runs handlers. 1, and true in the bool, if one raised an
/// exception, which is Python's current error then. Only ever so in the main thread.
int interrupted_by_signal(void* context);
/// Throws Python's current error.
[[noreturn]] void throw_python_error();

/// Calls a collective: after those before it, at once or deferred.
void post(const std::shared_ptr<Engine>& engine, const c10::intrusive_ptr<OperationWork>& work, bool defer);
/// Once for each engine: lets a timer start what is deferred in it.
void watch(const std::shared_ptr<Engine>& engine);
/// Starts what is deferred.
void flush(Engine& engine);
/// Takes the group away from the engine and leaves it. What is under way fails.
void leave(Engine& engine);
/// The same of all groups, when the interpreter ends: what follows destroys things that their threads use (OpenSSL's,
/// for one).
void leave_all();

/// Several works as one, for coalesced calls.
c10::intrusive_ptr<c10d::Work> combine(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace maniple_torch
