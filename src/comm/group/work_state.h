// The state of one asynchronous operation, which all copies of its Work share, and the queue that runs such operations.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "comm/backend/device/device_plugin.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include <maniple/comm/work.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// What the thread that watches operations on a device sleeps on. It looks often while a thread of the host waits for
/// one of them, and seldom otherwise: each look takes locks of the driver that those who enqueue need.
struct DeviceWatch {
  Mutex mutex;
  ForkSafeCondition changed;
  int waiting MANIPLE_GUARDED_BY(mutex) = 0;  // threads of the host
};

/// The copy to a device of a message that arrives in memory of the host. No stream waits for the message before
/// somebody needs it: a stream that waits may hold up others, which the sender waits for (they share queues to the GPU,
/// and some calls of CUDA wait for all). So either the message comes first, and is copied then, or a stream is ordered
/// after it, and waits, and copies.
class DeviceArrival {
 public:
  struct Copy {
    DeviceRuntime* runtime = nullptr;
    void* to = nullptr;
    std::shared_ptr<std::byte> memory;  ///< the message is behind the word
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
    const std::uint32_t* word = nullptr;        ///< set when the message is there
    std::shared_ptr<const DeviceEvent> posted;  ///< what its caller's stream held when it was posted comes before
    std::shared_ptr<const DeviceEvent> end;     ///< recorded behind the copy
  };
  explicit DeviceArrival(Copy copy) : copy_(std::move(copy)) {}

  /// Once: later calls, and calls after close(), enqueue nothing. Whether it is enqueued now.
  bool enqueue(DeviceStream stream);
  bool is_enqueued() const noexcept { return state_.load(std::memory_order_acquire) == State::enqueued; }
  /// It failed, or its group: nobody reads what it would have copied.
  void close() noexcept;

 private:
  enum class State : std::uint8_t { open, enqueued, closed };
  Mutex mutex_;
  std::atomic<State> state_{State::open};
  Copy copy_ MANIPLE_GUARDED_BY(mutex_);
};

/// The end of an operation on a device, for those who wait for it.
struct DeviceEnd {
  DeviceRuntime* runtime = nullptr;
  std::shared_ptr<const DeviceEvent> event;
  DeviceStream stream;    ///< on which it runs
  bool captured = false;  ///< into a graph: it is not run now
  std::shared_ptr<DeviceWatch> watch = {};
  std::shared_ptr<DeviceArrival> arrival = {};  ///< of a receive: the event means something once that is enqueued

  /// Whether the device has come to it.
  bool is_reached() const { return (!arrival || arrival->is_enqueued()) && runtime->reached(*event); }
};

/// The stream that the calling thread enqueues on (tensor/ sets it to LibTorch's current stream). Null: nobody knows.
using CurrentStream = void* (*)(int device);
extern std::atomic<CurrentStream> current_stream;

struct detail::WorkState {
  /// Wakes those who wait and runs what was to follow, in the calling thread. Once only.
  void finish(std::exception_ptr error);
  /// One that is finished, and is never destroyed: a Work may outlive static objects.
  static WorkState* make_done();

  /// Throws Aborted in a child of fork(): the thread that would finish it is the parent's.
  void require_owned() const;

  ForkGuard guard;
  std::atomic<bool> done{false};
  std::atomic<int> waiters{0};
  Mutex mutex;
  ForkSafeCondition changed;
  DeviceEnd device;                                                     // without a runtime: it is of the host
  std::exception_ptr error;                                             // set before done
  std::vector<std::function<void()>> follow MANIPLE_GUARDED_BY(mutex);  // run after done
};

/// The state behind a Work.
struct detail::WorkAccess {
  static const std::shared_ptr<WorkState>& state(const Work& work) noexcept { return work.state_; }
};

/// What follows in `stream`, a stream of the operation's device, comes after the operation. Throws its error where it
/// has failed before.
void order_after(const Work& work, void* stream);

/// Runs `callback` once the operation is done, whether it failed or not: at once if it is done already.
void when_done(const Work& work, std::function<void(const std::exception_ptr& error)> callback);

/// A Work that is done. All of them share one state, which nobody owns: copying them counts no references.
inline Work done_work() {
  // A static one is asked for by an acquire load, which on aarch64 waits for the stores before it. Here the pointer
  // itself orders what is read through it.
  static constinit std::atomic<detail::WorkState*> known{nullptr};
  detail::WorkState* state = known.load(std::memory_order_relaxed);
  if (state == nullptr) [[unlikely]] {
    static detail::WorkState* const made = detail::WorkState::make_done();
    known.store(state = made, std::memory_order_release);
  }
  return Work(std::shared_ptr<detail::WorkState>(std::shared_ptr<void>(), state));
}

/// A thread that runs tasks in order; started when the first task comes.
class TaskQueue {
 public:
  TaskQueue() = default;
  ~TaskQueue();  ///< runs what is queued (which fails fast once the group is aborted), then ends
  void push(std::function<void()> task);

 private:
  void run();
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ MANIPLE_GUARDED_BY(mutex_);
  bool stopping_ MANIPLE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace maniple
