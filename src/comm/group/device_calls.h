// The operations of a group on memory of a device: enqueued on streams, watched by a thread that never blocks them.
//
//   call -> order after the group's last operation on a device -> engine enqueues, and records "finished" -> watch
//
// Where the engine cannot tell that it waits for others, "started" is recorded before. The watching thread notes when
// operations finish. An operation whose stream has reached it and that is not finished when its time-out has passed, a
// fault that the engine reports, and the failure of the group (a rank that died, say) all end in the same way: the
// group is aborted, the engine ends what is enqueued so that streams go on, and the error is thrown by the next call on
// the host.
//
// What the engine cannot do, and everything when the group has none, goes through host memory: the stream copies into
// pinned memory and then waits for a word there; the group's thread runs the operation on the host and sets the word;
// the stream copies back. Large ones go in pieces, so that copying and communicating overlap. The host never waits
// either.
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
#include "comm/base/abort_signal.h"
#include "comm/base/mutex.h"
#include "comm/group/work_state.h"
#include "comm/transport/message.h"
#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// What is shared with handles that outlive the group: events, and pinned memory, which are kept for reuse.
class DevicePools {
 public:
  explicit DevicePools(DeviceRuntime& runtime) : runtime_(runtime) {}
  ~DevicePools();

  /// These go back to the pool with their last owner.
  static std::shared_ptr<const DeviceEvent> event(const std::shared_ptr<DevicePools>& pools, int device);
  static std::shared_ptr<std::byte> pinned(const std::shared_ptr<DevicePools>& pools, int device, std::size_t bytes);

 private:
  struct Pinned {
    int device = 0;  // that it was made with; all devices reach it
    std::byte* memory = nullptr;
  };
  DeviceRuntime& runtime_;
  Mutex mutex_;
  std::map<int, std::vector<std::unique_ptr<DeviceEvent>>> events_ MANIPLE_GUARDED_BY(mutex_);
  std::multimap<std::size_t, Pinned> pinned_ MANIPLE_GUARDED_BY(mutex_);
};

/// Words that streams wait for, in pinned memory, are so many bytes apart.
inline constexpr std::size_t kWordStride = 64;
inline void set_word(std::uint32_t* word) { std::atomic_ref<std::uint32_t>(*word).store(1, std::memory_order_release); }

class DeviceCalls {
 public:
  /// With an engine, all ranks of the group make it together. Without (`entry` null), on first use, each for itself.
  DeviceCalls(detail::GroupImpl& group, const DevicePluginEntry* entry, int device, Deadline deadline);
  ~DeviceCalls();

  /// Waits for what is enqueued, before the group is destroyed: until the group fails, or all others have left.
  void finish();

  std::string_view engine() const noexcept {
    return engine_ ? engine_->name() : std::string_view("through host memory");
  }
  DeviceRuntime& runtime() noexcept { return runtime_; }
  int device() const noexcept { return device_; }  ///< with an engine

  Work run(Operation operation, const CallOptions& call);
  /// As one operation where the engine can.
  Work run_all(std::vector<Operation> operations, const CallOptions& call);
  /// Messages are matched by their tags from now on, also where those of the engine are matched in the order of the
  /// calls: they go through host memory then. All ranks call it, before their first message.
  void match_by_tags() noexcept { by_tags_ = true; }
  /// One Work for each. `source` as in ProcessGroup::irecv.
  std::vector<Work> start_messages(std::span<const PointToPoint> operations, int* source, const CallOptions& call);
  /// A Work for all that the stream holds now; `keep` lives until then.
  Work mark(Device device, void* stream, std::shared_ptr<void> keep);
  RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline);

 private:
  /// The part of an operation that runs on the host.
  struct HostPart {
    std::exception_ptr error;  // set before `ended`
    std::atomic<bool> ended{false};
    void end(const std::exception_ptr& with) {
      error = with;
      ended.store(true, std::memory_order_release);
    }
  };
  /// One operation that is enqueued and not known to be finished.
  struct Pending {
    std::shared_ptr<detail::WorkState> work;
    std::shared_ptr<const DeviceEvent> started;  // null: the engine tells, or the time counts from when it was enqueued
    bool told = false;                           // by the engine
    bool running = false;                        // the stream has reached it
    Deadline ask;                                // then the others are asked what they have called
    Seconds ask_after{1};
    Seconds limit{};
    Deadline deadline;
    ErrorInfo context;
    bool recorded = false;                    // in the flight recorder, under context.sequence
    std::shared_ptr<HostPart> host;           // ends by itself when the group fails, with an error of its own
    std::vector<std::shared_ptr<void>> keep;  // memory that the stream uses
  };
  /// The operations of one stream that are not known to be finished, in the order in which the stream runs them.
  struct StreamQueue {
    Mutex enqueueing;            // held while an operation's end is recorded and the operation added to the queue
    std::list<Pending> pending;  // guarded by watch_->mutex; only the watching thread removes from it
  };
  /// The right to add to a queue: no other thread records an end on the stream meanwhile.
  struct Enqueueing {
    std::shared_ptr<StreamQueue> queue;
    std::unique_lock<Mutex> lock;  // handed on with the right, which Clang cannot follow
  };
  /// Where an operation is listed.
  struct Position {
    std::list<Pending>* list;
    std::list<Pending>::iterator at;
    Pending* operator->() const { return &*at; }
  };
  /// Messages through host memory: they start when all that they send has been copied.
  struct StagedMessages {
    std::vector<std::shared_ptr<Message>> messages;
    Seconds limit{};
    std::vector<std::shared_ptr<const DeviceEvent>> copied;
  };
  class DescriptorsOfGroup;
  class AbortOfGroup;

  /// Of our own streams: collectives must not wait behind a receive, nor a send behind either.
  enum class Purpose : int { collectives, sends, receives };
  DeviceStream own_stream(int device, Purpose purpose);
  /// Where an operation that was called on `stream` runs; what it does there comes after what `stream` holds.
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
  /// Removes from the front of `queue` the operations that the stream has finished, and returns them.
  std::vector<Position> take_ended(std::vector<Position>& queue);
  void start_staged_messages();
  bool is_sending() MANIPLE_REQUIRES(watch_->mutex);
  /// Gives up, and returns true, when the stream has reached it and its time is over. `oldest`: of those that the
  /// engine tells of.
  bool is_late(Pending& pending, bool oldest);
  /// The same for one that another rank will never call, as it has left the group.
  bool is_left(const Pending& pending);
  /// Before an error of the device is reported: it may be a consequence. Where ranks share a GPU by MPS, one that is
  /// killed while its kernels run makes the device fail for all; the failure detector knows which, and tells soon.
  void await_first_cause();
  void retire(Pending& pending, const std::exception_ptr& error);
  /// Aborts the group, if it is not aborted yet, and the engine; everything that is enqueued fails, but for what has a
  /// part on the host that is still to end.
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
  std::shared_ptr<const DeviceEvent> engine_event_;  // that it was given last
  bool by_tags_ = false;
  Mutex streams_mutex_;
  std::map<std::pair<int, Purpose>, DeviceStream> streams_ MANIPLE_GUARDED_BY(streams_mutex_);

  std::shared_ptr<const DeviceEvent> last_event_;  // of the last operation outside of graphs, and where it ran
  DeviceStream last_stream_;

  const std::shared_ptr<DeviceWatch> watch_ = std::make_shared<DeviceWatch>();
  ForkSafeCondition& changed_ = watch_->changed;
  std::map<DeviceStream, std::shared_ptr<StreamQueue>> queues_ MANIPLE_GUARDED_BY(watch_->mutex);
  /// Receives, whose copies may be enqueued in any order. Only the watching thread removes from it.
  std::list<Pending> arrivals_ MANIPLE_GUARDED_BY(watch_->mutex);
  std::vector<StagedMessages> staged_messages_ MANIPLE_GUARDED_BY(watch_->mutex);
  /// That another rank may still be receiving.
  std::vector<std::shared_ptr<HostPart>> sends_ MANIPLE_GUARDED_BY(watch_->mutex);
  bool stopping_ MANIPLE_GUARDED_BY(watch_->mutex) = false;
  bool gave_up_ = false;  // of the watching thread alone
  std::thread watcher_;
  std::unique_ptr<AbortListener> listener_;
};

}  // namespace maniple
