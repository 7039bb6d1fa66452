// A group's operations on device memory: enqueued on streams, and watched by a thread that never blocks them.
//
//   call -> order after the group's last operation on a device -> engine enqueues, and records "finished" -> watch
//
// If the engine cannot report whether it waits for other ranks, an event "started" is recorded first. The watching
// thread notes when operations finish. Three conditions end the group: an operation whose stream has reached it does
// not finish within its time-out, the engine reports a fault, or the group fails (a rank died, say). In each case the
// group is aborted, the engine cancels its enqueued work so that streams continue, and the next call on the host throws
// the error.
//
// Operations that the engine cannot run, or all operations if the group has no engine, go through host memory. The
// stream copies into pinned memory and then waits for a word there; the group's thread runs the operation on the host
// and sets the word; the stream copies back. Large operations go in pieces, so that copying and communicating overlap.
// The calling thread does not wait here, either.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "comm/backend/device/device_plugin.h"
#include "comm/backend/plugin/load.h"
#include "comm/backend/work_state.h"
#include "comm/base/abort_signal.h"
#include "comm/base/mutex.h"
#include "comm/transport/message.h"
#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// Pools of events and pinned memory, kept for reuse. Shared with handles that may outlive the group.
class DevicePools {
 public:
  explicit DevicePools(DeviceRuntime& runtime) : runtime_(runtime) {}
  ~DevicePools();

  /// The last owner's release returns these to the pool.
  static std::shared_ptr<const DeviceEvent> event(const std::shared_ptr<DevicePools>& pools, int device);
  static std::shared_ptr<std::byte> pinned(const std::shared_ptr<DevicePools>& pools, int device, std::size_t bytes);

 private:
  struct Pinned {
    int device = 0;  // the device it was made with; all devices reach it
    std::byte* memory = nullptr;
  };
  DeviceRuntime& runtime_;
  Mutex mutex_;
  std::map<int, std::vector<std::unique_ptr<DeviceEvent>>> events_ MANIPLE_GUARDED_BY(mutex_);
  std::multimap<std::size_t, Pinned> pinned_ MANIPLE_GUARDED_BY(mutex_);
};

/// Stride in bytes between wait words in pinned memory.
inline constexpr std::size_t kWordStride = 64;
inline void set_word(std::uint32_t* word) { std::atomic_ref<std::uint32_t>(*word).store(1, std::memory_order_release); }

class DeviceCalls {
 public:
  /// With an engine all ranks of the group construct it together; without one (`entry` null) each rank does so by
  /// itself, on first use.
  DeviceCalls(detail::GroupImpl& group, const DevicePluginEntry* entry, int device, Deadline deadline);
  ~DeviceCalls();

  /// Waits for enqueued work before the group is destroyed: until it completes, the group fails, or all others have
  /// left.
  void finish();

  std::string_view engine() const noexcept {
    return engine_ ? engine_->name() : std::string_view("through host memory");
  }
  DeviceRuntime& runtime() noexcept { return runtime_; }
  int device() const noexcept { return device_; }  ///< with an engine

  Work run(Operation operation, const CallOptions& call);
  /// Runs the operations as one where the engine can.
  Work run_all(std::vector<Operation> operations, const CallOptions& call);
  /// Matches messages by tag from now on. An engine that matches messages in the order of the calls is bypassed: they
  /// go through host memory. All ranks call it, before their first message.
  void match_by_tags() noexcept { by_tags_ = true; }
  /// Returns one Work per message. `source`: as in ProcessGroup::irecv.
  std::vector<Work> start_messages(std::span<const PointToPoint> operations, int* source, const CallOptions& call);
  /// Returns a Work that completes when the stream's current contents do; `keep` lives until then.
  Work mark(Device device, void* stream, std::shared_ptr<void> keep);
  RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline);

 private:
  /// An operation's host part.
  struct HostPart {
    std::exception_ptr error;  // set before `ended`
    std::atomic<bool> ended{false};
    void end(const std::exception_ptr& with) {
      error = with;
      ended.store(true, std::memory_order_release);
    }
  };
  /// An enqueued operation that is not known to be finished.
  struct Pending {
    std::shared_ptr<detail::WorkState> work;
    std::shared_ptr<const DeviceEvent> started;  // null: the engine reports it, or the time counts from the enqueue
    bool told = false;                           // the engine reports when it waits
    bool running = false;                        // the stream has reached the operation
    Deadline ask;                                // when to ask the other ranks for their calls
    Seconds ask_after{1};
    Seconds limit{};
    Deadline deadline;
    ErrorInfo context;
    bool recorded = false;                    // in the flight recorder, under context.sequence
    std::shared_ptr<HostPart> host;           // ends by itself, with its own error, when the group fails
    std::vector<std::shared_ptr<void>> keep;  // memory in use by the stream
  };
  /// One stream's operations that are not known to be finished, in stream order.
  struct StreamQueue {
    Mutex enqueueing;            // held while an operation's end is recorded and the operation is queued
    std::list<Pending> pending;  // guarded by watch_->mutex; only the watching thread removes from it
  };
  /// The right to add to a queue: no other thread may record an end on the stream meanwhile.
  struct Enqueueing {
    std::shared_ptr<StreamQueue> queue;
    std::unique_lock<Mutex> lock;  // moves with the right, which Clang's analysis cannot follow
  };
  /// An operation's place in a list.
  struct Position {
    std::list<Pending>* list;
    std::list<Pending>::iterator at;
    Pending* operator->() const { return &*at; }
  };
  /// Messages through host memory: they start once the data to send has been copied.
  struct StagedMessages {
    std::vector<std::shared_ptr<Message>> messages;
    Seconds limit{};
    std::vector<std::shared_ptr<const DeviceEvent>> copied;
  };
  class DescriptorsOfGroup;
  class AbortOfGroup;

  /// Each purpose has a stream of its own: collectives must not wait behind a receive, nor a send behind either.
  enum class Purpose : int { collectives, sends, receives };
  DeviceStream own_stream(int device, Purpose purpose);
  /// The stream on which an operation called on `stream` runs, ordered after the current contents of `stream`.
  DeviceStream stream_for(DeviceStream stream, const CallOptions& call, Purpose purpose);
  void order_after_last(DeviceStream stream, bool captured);

  void require_device(Device device, Op op) const;
  std::shared_ptr<detail::WorkState> make_work(DeviceStream stream, bool captured);
  std::shared_ptr<detail::WorkState> enqueue(std::span<Operation> operations, const CallOptions& call);
  Work run_staged(Operation operation, const CallOptions& call);
  std::vector<Work> enqueue_messages(std::span<const PointToPoint> operations, int* source, const CallOptions& call);
  std::vector<Work> stage_messages(std::span<const PointToPoint> operations, int* source, const CallOptions& call);

  void start_watching() MANIPLE_REQUIRES(watch_->mutex);
  Enqueueing begin_enqueueing(DeviceStream stream);
  void watch(Pending pending, Enqueueing to);
  void watch_arrival(Pending pending);
  void add(std::list<Pending>& to, Pending pending) MANIPLE_EXCLUDES(watch_->mutex);
  bool is_idle() const MANIPLE_REQUIRES(watch_->mutex);
  std::vector<std::list<Pending>*> all_pending() MANIPLE_REQUIRES(watch_->mutex);
  void watch_loop();
  void look() MANIPLE_EXCLUDES(watch_->mutex);
  /// Removes finished operations from the front of `queue` and returns them.
  std::vector<Position> take_ended(std::vector<Position>& queue);
  void start_staged_messages();
  bool is_sending() MANIPLE_REQUIRES(watch_->mutex);
  /// Gives up, and returns true, if the stream has reached the operation and its time is over. `oldest`: it is the
  /// oldest one that the engine reports on.
  bool is_late(Pending& pending, bool oldest);
  /// The same for an operation that another rank will never call, as it has left the group.
  bool is_left(const Pending& pending);
  /// Waits briefly before a device error is reported, as the error may be a consequence. If ranks share a GPU through
  /// MPS, killing one while its kernels run makes the device fail for all; the failure detector soon reports which rank
  /// it was.
  void await_first_cause();
  void retire(Pending& pending, const std::exception_ptr& error);
  /// Aborts the group, unless it is aborted already, and the engine. All enqueued operations fail, except operations
  /// whose host part has yet to end.
  void give_up(const std::exception_ptr& error, const ErrorInfo& context) MANIPLE_EXCLUDES(watch_->mutex);

  detail::GroupImpl& group_;
  DeviceRuntime& runtime_;
  int device_;
  std::shared_ptr<DevicePools> pools_;
  std::unique_ptr<DescriptorExchange> descriptors_;
  std::unique_ptr<AbortToken> abort_token_;
  std::shared_ptr<Store> store_;
  std::unique_ptr<DevicePlugin> engine_;
  bool engine_tells_ = false;                        // DevicePlugin::waits
  std::shared_ptr<const DeviceEvent> engine_event_;  // the event the engine was given last
  bool by_tags_ = false;
  Mutex streams_mutex_;
  std::map<std::pair<int, Purpose>, DeviceStream> streams_ MANIPLE_GUARDED_BY(streams_mutex_);

  std::shared_ptr<const DeviceEvent> last_event_;  // of the last operation outside graphs, and the stream it ran on
  DeviceStream last_stream_;

  const std::shared_ptr<DeviceWatch> watch_ = std::make_shared<DeviceWatch>();
  ForkSafeCondition& changed_ = watch_->changed;
  std::map<DeviceStream, std::shared_ptr<StreamQueue>> queues_ MANIPLE_GUARDED_BY(watch_->mutex);
  /// Receives, whose copies may be enqueued in any order. Only the watching thread removes entries.
  std::list<Pending> arrivals_ MANIPLE_GUARDED_BY(watch_->mutex);
  std::vector<StagedMessages> staged_messages_ MANIPLE_GUARDED_BY(watch_->mutex);
  /// Sends that another rank may still be receiving.
  std::vector<std::shared_ptr<HostPart>> sends_ MANIPLE_GUARDED_BY(watch_->mutex);
  bool stopping_ MANIPLE_GUARDED_BY(watch_->mutex) = false;
  bool gave_up_ = false;  // used by the watching thread alone
  std::thread watcher_;
  std::unique_ptr<AbortListener> listener_;
};

}  // namespace maniple
