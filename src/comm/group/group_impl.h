// The implementation of ProcessGroup: order of operations, deadlines, flight recorder, failure handling.
//
//   ProcessGroup::all_reduce                   collectives.cpp; validate.cpp checks the arguments, makes an Operation
//   run -> run_now -> run_tasks                in the calling thread if the group is idle, otherwise like start
//   run -> start -> start_tasks                async_op: in the group's own thread (the queue), returns a Work
//   execute                                    one operation: assigns its number, records it, calls Backend::run
//   run -> enqueue                             device memory: the same, but calls Backend::enqueue (device_memory.cpp)
//   fail -> propagate, failure                 it threw: aborts the group on all ranks; the error names the call
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/backend/backend.h"
#include "comm/backend/work_state.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include "comm/base/ticks.h"
#include "comm/group/recorder.h"
#include <maniple/comm/process_group.h>

namespace maniple {

struct GroupFacts {
  std::string name;
  Topology topology;
  std::shared_ptr<Session> session;
  std::string backend;
  int device = -1;  ///< InitOptions::device
  TransportKind transport = TransportKind::automatic;
  std::string algorithm;
  Seconds timeout{};
};

/// A thread that runs tasks in order; it starts with the first task.
class TaskQueue {
 public:
  TaskQueue() = default;
  ~TaskQueue();  ///< runs the queued tasks (they fail fast once the group is aborted), then ends
  void push(std::function<void()> task);

 private:
  void run();
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ MANIPLE_GUARDED_BY(mutex_);
  bool stopping_ MANIPLE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

/// The options of a call at this line, which counts unless the options have a place.
inline CallOptions called_at(const CallOptions& options, const SourceLocation& where) {
  return {options.timeout, options.async_op, options.stream, options.where.or_else(where)};
}

class detail::GroupImpl {
 public:
  /// Sets up the backend and passes a first barrier: on return, all ranks have joined.
  GroupImpl(GroupFacts facts, Deadline deadline);
  /// For a rank outside the group: a handle whose operations do nothing. Uses only the name, backend and session of
  /// `facts`, and does not keep the session.
  explicit GroupImpl(GroupFacts facts);
  /// For a worker that has not joined its job: all operations throw `unusable` (elastic.h). Without a session.
  GroupImpl(GroupFacts facts, std::exception_ptr unusable);
  ~GroupImpl();

  const GroupFacts& facts() const noexcept { return facts_; }
  int rank() const noexcept { return facts_.topology.rank; }
  int size() const noexcept { return is_member() ? facts_.topology.size() : -1; }
  bool is_member() const noexcept { return facts_.topology.rank >= 0; }
  bool is_detached() const noexcept { return is_member() && facts_.session == nullptr; }
  Backend& backend() noexcept { return *backend_; }
  AbortSignal& abort_signal() noexcept { return *abort_; }
  /// The round of this rank's last shrink(): survivors.h.
  std::uint64_t last_shrink() const noexcept { return last_shrink_; }
  void set_last_shrink(std::uint64_t round) noexcept { last_shrink_ = round; }
  Store& store() noexcept { return *store_; }
  const Recorder& recorder() const noexcept { return *recorder_; }

  /// The call's time-out. Throws InvalidArgument if it is negative or NaN.
  Seconds limit(const CallOptions& call) const;

  /// False for a rank outside the group, whose call must do nothing; the first such call on this handle logs a warning.
  bool takes_part(std::string_view operation) {
    if (is_member()) [[likely]]
      return true;
    warn_not_member(operation);
    return false;
  }
  /// Throws InvalidArgument for a rank outside the group.
  void require_member(std::string_view who) const;

  /// Runs the operation of a call at this line, or starts it if `options.async_op` is set.
  Work run(Operation operation, const CallOptions& options, const SourceLocation& where) {
    operation.where = options.where.or_else(where);
    if (!operation.device.is_cpu()) [[unlikely]]
      return enqueue({&operation, 1}, called_at(options, where));
    if (options.async_op) return start(std::move(operation), called_at(options, where));
    run_now(operation, options);
    return done_work();
  }
  /// Runs the operation in this thread if the group is idle, otherwise in the group's thread after the queued
  /// operations.
  void run_now(Operation& operation, const CallOptions& options) {
    run_tasks(operation.op, options, operation.where,
              [this, &operation](OperationContext& context) { execute(operation, context); });
  }
  Work start(Operation operation, const CallOptions& call);

  bool in_forked_child() const noexcept { return !guard_.owned(); }

  /// Like run_now, for a body that executes one operation, or several as one.
  template <class Body>
  void run_tasks(Op op, const CallOptions& options, const SourceLocation& where, Body&& body) {
    require_usable(op, where);
    if (load_acquire(queued_) == 0 && !exchange_acquire(busy_)) {
      const Release release{busy_};
      OperationContext context(limit(options));
      body(context);
      return;
    }
    start_tasks(op, called_at(options, where), [&body](OperationContext& context) { body(context); }).wait();
  }
  template <class Body>
  void run_tasks(Op op, const CallOptions& call, Body&& body) {
    run_tasks(op, call, call.where, std::forward<Body>(body));
  }
  /// `seen`: the caller observes failure through the Work. Otherwise the next call throws it.
  Work start_tasks(Op op, const CallOptions& call, std::function<void(OperationContext&)> body, bool seen = true);

  /// Runs one collective, records it and handles its failure. Call only within run_tasks and start_tasks.
  void execute(Operation& operation, OperationContext& context);
  /// Call inside a catch handler for such an operation's failure: aborts the group on all ranks and throws an error
  /// that names the call.
  [[noreturn]] void fail(const Operation& operation);

  // ---- Messages ------------------------------------------------------------------------------------------------
  /// Checks the arguments and fills in the message.
  void describe_message(const PointToPoint& operation, Message& message) const;
  std::shared_ptr<Message> make_message(const PointToPoint& operation, const CallOptions& call) const;
  int run_message(const PointToPoint& operation, const CallOptions& call);
  std::vector<Work> start_messages(std::span<const PointToPoint> operations, int* source, const CallOptions& call);

  MessageWait oldest_message() const;

  // ---- Device memory ---------------------------------------------------------------------------------------------
  // All throw Unsupported if the GPU runtime is missing.
  /// Enqueues the operations on one device, as one where the backend can.
  Work enqueue(std::span<Operation> operations, const CallOptions& call);
  /// Returns one Work per message. `source`: as in ProcessGroup::irecv.
  std::vector<Work> enqueue_messages(std::span<const PointToPoint> operations, int* source, const CallOptions& call);
  /// Matches messages by tag from now on. A backend that matches messages in the order of the calls is bypassed: they
  /// go through host memory. All ranks call it, before their first message.
  void match_by_tags() noexcept { by_tags_ = true; }
  /// Returns a Work that completes when the stream's current contents do; `keep` lives until then.
  Work mark(Device device, void* stream, std::shared_ptr<void> keep);
  /// The backend for registered memory on the device.
  Backend& backend_for(Device device);
  /// The GPU of this rank, if the group's backend is for GPUs.
  int device();
  /// Whether the group's backend is for GPUs, which makes registered memory on them possible.
  bool has_device_engine() const noexcept { return device_engine_; }
  /// Whether CPU tensors are accepted (BackendChoice).
  bool serves_host_tensors() const noexcept { return host_tensors_; }

  // ---- Ends ----------------------------------------------------------------------------------------------------
  void require_usable(Op op, const SourceLocation& where) {
    if (!guard_.owned() || abort_->raised()) [[unlikely]]
      throw_unusable(op, where);
  }
  void abort(const std::string& reason);
  /// The fields of this call's error: operation, group, ranks; no reason yet.
  ErrorInfo context_of(std::string_view operation, std::uint64_t sequence = 0, std::string arguments = {}) const;

  std::uint64_t next_group() noexcept { return ++groups_; }
  std::uint64_t next_allocation() noexcept { return ++allocations_; }
  std::uint64_t next_monitored() noexcept { return ++monitored_; }
  /// The number of the last barrier whose key has been erased.
  std::uint64_t& monitored_cleared() noexcept { return monitored_cleared_; }

 private:
  struct Release {
    std::atomic<bool>& busy;
    ~Release() { busy.store(false, std::memory_order_release); }
  };
  class DeviceObserver;
  struct Devices;
  void set_up(Deadline deadline);
  void make_engine(const BackendEntry& engine, BackendContext context);
  /// Created on first use, unless the group's backend is for GPUs.
  Devices& devices();
  /// An operation whose host part runs in the group's thread, in the order of the calls.
  Work enqueue_in_parts(Backend& backend, Operation& operation, const StreamCall& stream_call, const CallOptions& call);
  /// Waits for enqueued work before the group is destroyed: until it completes, the group fails, or all others have
  /// left.
  void drain_devices();
  /// The first rank that left the group in good order before this call; -1: none is known to have left.
  int left_before(std::uint64_t seq) const;
  void warn_not_member(std::string_view operation);
  [[noreturn]] void throw_unusable(Op op, const SourceLocation& where);
  /// Aborts the group on all ranks for this error unless it is aborted already. Returns the first cause if that
  /// differs: a closed connection, for example, may be a consequence of a failure elsewhere.
  std::exception_ptr propagate(const std::exception_ptr& error, const ErrorInfo& context);
  /// Converts `error` to the error that the call throws. This rank's first error is also reported to the launcher.
  std::exception_ptr failure(const std::exception_ptr& error, const ErrorInfo& context);
  /// Keeps the failure of an operation without a waiter.
  void keep_unseen(const std::exception_ptr& error);
  ErrorInfo context_of(const Message& message) const;

  GroupFacts facts_;
  int global_rank_;
  std::shared_ptr<AbortSignal> abort_;  // null outside the group, like the next three members
  std::shared_ptr<Store> store_;
  std::unique_ptr<Backend> backend_;
  std::shared_ptr<Recorder> recorder_;
  bool host_tensors_ = true;
  bool device_engine_ = false;
  Mutex device_mutex_;
  /// Declared after the backend, which finishes its messages.
  std::shared_ptr<Devices> devices_ MANIPLE_GUARDED_BY(device_mutex_);
  bool by_tags_ = false;
  ForkGuard guard_;
  // In the group: a call on this rank has thrown the first cause. Outside: the warning has been logged.
  std::atomic<bool> thrown_{false};
  Mutex unseen_mutex_;
  /// The first failure of an operation without a waiter: the next call throws it.
  std::exception_ptr unseen_ MANIPLE_GUARDED_BY(unseen_mutex_);
  std::atomic<bool> leaving_{false};  // being destroyed: resulting failures are not reported
  std::atomic<bool> busy_{false};
  std::atomic<int> queued_{0};
  std::uint64_t seq_ = 0;  // guarded by busy_
  std::uint64_t last_shrink_ = 0;
  mutable Mutex departures_mutex_;
  /// Departed ranks, and the last call of each.
  std::map<int, std::uint64_t> departures_ MANIPLE_GUARDED_BY(departures_mutex_);
  std::uint64_t groups_ = 0;
  std::uint64_t allocations_ = 0;
  std::uint64_t monitored_ = 0;
  std::uint64_t monitored_cleared_ = 0;
  TaskQueue queue_;  // last: its thread uses the members above
};

}  // namespace maniple
