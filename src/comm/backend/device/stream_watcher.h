// Watches operations that are enqueued on streams: a thread notes when they end, and ends all of them if one fails.
//
//   const auto place = watcher.begin(stream);     // no other thread records an end on the stream meanwhile
//   ...                                           // enqueue the operation, record its end
//   watcher.add(std::move(operation), place);     // the thread finishes operation.work once the end is reached
//
// Three conditions end all operations: an operation whose stream has reached it does not end within its time-out, the
// engine reports a fault, or the abort signal is raised (a rank died, say). The watcher then reports the error to its
// observer and aborts the engine, so that streams continue.
//
// The watcher knows streams, events and one engine; the observer knows the group. All methods may be called from any
// thread, except stop() and end_all(), which the owner calls last.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/backend/device/device_plugin.h"
#include "comm/backend/work_state.h"
#include "comm/base/abort_signal.h"
#include "comm/base/mutex.h"
#include <maniple/comm/options.h>

namespace maniple {

/// What the watcher reports, on its thread.
class StreamObserver {
 public:
  virtual ~StreamObserver() = default;
  /// A recorded operation has ended.
  virtual void ended(std::uint64_t seq, bool failed) noexcept = 0;
  /// The operation that `context` names has failed, and all others fail with it. Returns the first cause.
  virtual std::exception_ptr failed(const std::exception_ptr& error, const ErrorInfo& context) = 0;
  /// A rank that will never call operation `seq`, because it left earlier; -1: none.
  virtual int left_before(std::uint64_t seq) const = 0;
  /// Operation `seq` is waiting for other ranks: do they call the same?
  virtual void compare_calls(std::uint64_t seq) = 0;
};

/// The end of an operation's host part, for operations that go through host memory.
struct HostEnd {
  std::exception_ptr error;  // set before `ended`
  std::atomic<bool> ended{false};
  void end(const std::exception_ptr& with) {
    error = with;
    ended.store(true, std::memory_order_release);
  }
};

/// An enqueued operation that is not known to have ended.
struct StreamOperation {
  std::shared_ptr<detail::WorkState> work;
  std::shared_ptr<const DeviceEvent> started;  ///< null: the engine reports it, or the time counts from the enqueue
  bool reported = false;                       ///< the engine reports when the operation waits
  Seconds limit{};                             ///< Seconds::max(): none
  ErrorInfo context;                           ///< names the call
  bool recorded = false;                       ///< in the flight recorder, under context.sequence
  std::shared_ptr<HostEnd> host;               ///< ends by itself, with its own error, if the abort signal is raised
  std::vector<std::shared_ptr<void>> keep;     ///< memory in use by the stream

  // The watcher sets these.
  bool running = false;  ///< the stream has reached the operation
  Deadline deadline;
  Deadline compare;  ///< when to compare the ranks' calls
  Seconds compare_after{1};
};

class StreamWatcher {
  struct Queue;

 public:
  struct Options {
    DeviceRuntime* runtime = nullptr;
    AbortSignal* abort = nullptr;
    StreamObserver* observer = nullptr;
    ErrorInfo context;              ///< for errors: group, rank, size and origin
    std::vector<int> global_ranks;  ///< indexed by the engine's ranks
  };
  explicit StreamWatcher(Options options);
  ~StreamWatcher();
  StreamWatcher(const StreamWatcher&) = delete;
  StreamWatcher& operator=(const StreamWatcher&) = delete;

  /// Watches the engine's faults too, and aborts it with the group. It must live until stop().
  void watch_engine(DevicePlugin& engine);

  /// The right to add to a stream's queue: no other thread may record an end on the stream meanwhile.
  struct Place {
    std::shared_ptr<Queue> queue;
    std::unique_lock<Mutex> lock;  // moves with the right, which Clang's analysis cannot follow
  };
  Place begin(DeviceStream stream);
  /// An operation in a graph does not run now: its Work is done at once.
  void add(StreamOperation operation, Place to);
  /// For a receive: receives may end in any order.
  void add_arrival(StreamOperation operation);
  /// Calls `then` once all events are reached; with an error if the operations fail first. drain() also waits for
  /// `sends`, which other ranks may still be receiving.
  void call_after(std::vector<std::shared_ptr<const DeviceEvent>> events, std::vector<std::shared_ptr<HostEnd>> sends,
                  std::function<void(const std::exception_ptr& error)> then);

  /// Waits until all operations have ended or the abort signal is raised. Once `pointless` returns true, waits for one
  /// more second; returns false if operations are left then.
  bool drain(const std::function<bool()>& pointless);
  /// Waits briefly before a device error is reported, as the error may be a consequence. If ranks share a GPU through
  /// MPS, killing one while its kernels run makes the device fail for all; the failure detector soon reports which rank
  /// it was.
  void await_first_cause();

  /// Ends the thread. Returns whether all operations had ended.
  bool stop();
  /// After stop(): fails the remaining operations.
  void end_all();

  ErrorInfo context_of(std::string_view operation, std::uint64_t seq = 0) const;
  /// For DeviceEnd: threads that wait for operations count themselves here.
  const std::shared_ptr<DeviceWatch>& watch() const noexcept { return watch_; }

 private:
  /// One stream's operations, in stream order.
  struct Queue {
    Mutex enqueueing;                    // held while an operation's end is recorded and the operation is queued
    std::list<StreamOperation> pending;  // guarded by watch_->mutex; only the watching thread removes from it
  };
  /// An operation's place in a list.
  struct Position {
    std::list<StreamOperation>* list;
    std::list<StreamOperation>::iterator at;
    StreamOperation* operator->() const { return &*at; }
  };
  struct Call {
    std::vector<std::shared_ptr<const DeviceEvent>> events;
    std::function<void(const std::exception_ptr& error)> then;
  };

  void start() MANIPLE_REQUIRES(watch_->mutex);
  void append(std::list<StreamOperation>& to, StreamOperation operation) MANIPLE_EXCLUDES(watch_->mutex);
  bool is_idle() const MANIPLE_REQUIRES(watch_->mutex);
  bool is_sending() MANIPLE_REQUIRES(watch_->mutex);
  std::vector<std::list<StreamOperation>*> all_pending() MANIPLE_REQUIRES(watch_->mutex);
  void run();
  void poll() MANIPLE_EXCLUDES(watch_->mutex);
  void make_calls() MANIPLE_EXCLUDES(watch_->mutex);
  /// Removes ended operations from the front of `queue` and returns them.
  std::vector<Position> take_ended(std::vector<Position>& queue);
  /// Gives up, and returns true, if the stream has reached the operation and its time is over. `oldest`: it is the
  /// oldest one that the engine reports on.
  bool is_late(StreamOperation& operation, bool oldest);
  /// The same for an operation that another rank will never call, as it has left.
  bool is_left(const StreamOperation& operation);
  void give_up_on_fault(const DeviceFault& fault) MANIPLE_EXCLUDES(watch_->mutex);
  /// Reports the error, unless the abort signal is raised already, and aborts the engine. All operations fail, except
  /// operations whose host part has yet to end.
  void give_up(const std::exception_ptr& error, const ErrorInfo& context) MANIPLE_EXCLUDES(watch_->mutex);
  void retire(StreamOperation& operation, const std::exception_ptr& error);

  const Options options_;
  DeviceRuntime& runtime_;
  AbortSignal& abort_;
  DevicePlugin* engine_ = nullptr;  // set before the thread starts
  const std::shared_ptr<DeviceWatch> watch_ = std::make_shared<DeviceWatch>();
  CondVar& changed_ = watch_->changed;
  std::map<DeviceStream, std::shared_ptr<Queue>> queues_ MANIPLE_GUARDED_BY(watch_->mutex);
  /// Receives, whose copies may be enqueued in any order. Only the watching thread removes entries.
  std::list<StreamOperation> arrivals_ MANIPLE_GUARDED_BY(watch_->mutex);
  std::vector<Call> calls_ MANIPLE_GUARDED_BY(watch_->mutex);
  std::vector<std::shared_ptr<HostEnd>> sends_ MANIPLE_GUARDED_BY(watch_->mutex);
  bool stopping_ MANIPLE_GUARDED_BY(watch_->mutex) = false;
  bool gave_up_ = false;  // used by the watching thread alone
  std::thread thread_;
  std::unique_ptr<AbortListener> listener_;
};

}  // namespace maniple
