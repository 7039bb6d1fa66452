// The state of an asynchronous operation, shared by all copies of its Work: on the host, or enqueued on a stream.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "comm/backend/device/device_plugin.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include <maniple/comm/work.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// The condition that the thread watching device operations sleeps on. That thread polls often while a host thread
/// waits for one of them, and seldom otherwise: each poll takes driver locks that enqueuing threads need.
struct DeviceWatch {
  Mutex mutex;
  CondVar changed;
  int waiting MANIPLE_GUARDED_BY(mutex) = 0;  // waiting host threads
};

/// The copy to a device of a message that arrives in host memory. No stream waits for the message before its data is
/// needed. A waiting stream may hold up other streams that the sender depends on: streams share queues to the GPU, and
/// some CUDA calls wait for all streams. So the copy is enqueued when the message arrives, or earlier on a stream that
/// is ordered after the message; that stream waits first.
class DeviceArrival {
 public:
  struct Copy {
    DeviceRuntime* runtime = nullptr;
    void* to = nullptr;
    std::shared_ptr<std::byte> memory;  ///< pinned memory: the wait word, then the message
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
    const std::uint32_t* word = nullptr;        ///< set once the message has arrived
    std::shared_ptr<const DeviceEvent> posted;  ///< the copy comes after the caller's stream as it was at the post
    std::shared_ptr<const DeviceEvent> end;     ///< recorded after the copy
  };
  explicit DeviceArrival(Copy copy) : copy_(std::move(copy)) {}

  /// Enqueues the copy once: later calls, and calls after close(), do nothing. Returns whether it is enqueued now.
  bool enqueue(DeviceStream stream);
  bool is_enqueued() const noexcept { return state_.load(std::memory_order_acquire) == State::enqueued; }
  /// The message or its group failed, so the copy is not needed any more.
  void close() noexcept;

 private:
  enum class State : std::uint8_t { open, enqueued, closed };
  Mutex mutex_;
  std::atomic<State> state_{State::open};
  Copy copy_ MANIPLE_GUARDED_BY(mutex_);
};

/// The end of a device operation, for its waiters.
struct DeviceEnd {
  DeviceRuntime* runtime = nullptr;
  std::shared_ptr<const DeviceEvent> event;
  DeviceStream stream;    ///< the stream it runs on
  bool captured = false;  ///< captured into a graph: it does not run now
  std::shared_ptr<DeviceWatch> watch = {};
  std::shared_ptr<DeviceArrival> arrival = {};  ///< for a receive: the event is valid once the copy is enqueued

  /// Whether the device has reached the end.
  bool is_reached() const { return (!arrival || arrival->is_enqueued()) && runtime->reached(*event); }
};

/// Returns the stream that the calling thread enqueues on (train/tensor/ sets it to LibTorch's current stream). Null:
/// unknown.
using CurrentStream = void* (*)(int device);
extern std::atomic<CurrentStream> current_stream;

struct detail::WorkState {
  /// Wakes the waiters and runs `follow`, in the calling thread. Call once only.
  void finish(std::exception_ptr error);
  /// Returns a finished state that is never destroyed: a Work may outlive static objects.
  static WorkState* make_done();

  /// Throws Aborted in a child of fork(): only the parent has the thread that would finish the operation.
  void require_owned() const;

  ForkGuard guard;
  std::atomic<bool> done{false};
  std::atomic<int> waiters{0};
  Mutex mutex;
  CondVar changed;
  DeviceEnd device;                                                     // without a runtime: a host operation
  std::exception_ptr error;                                             // set before done
  std::vector<std::function<void()>> follow MANIPLE_GUARDED_BY(mutex);  // run after done
};

/// Orders later work in `stream`, a stream of the operation's device, after the operation. Throws its error if it has
/// failed already.
void order_after(const Work& work, void* stream);

/// Runs `callback` once the operation is done, even if it failed; at once if it is done already.
void when_done(const Work& work, std::function<void(const std::exception_ptr& error)> callback);

/// Returns a finished Work. They all share one state without an owner, so copies skip reference counting.
inline Work done_work() {
  // A function-local static is guarded by an acquire load, which on aarch64 waits for earlier stores. Here the data
  // dependency through the pointer orders the reads.
  static constinit std::atomic<detail::WorkState*> known{nullptr};
  detail::WorkState* state = known.load(std::memory_order_relaxed);
  if (state == nullptr) [[unlikely]] {
    static detail::WorkState* const made = detail::WorkState::make_done();
    known.store(state = made, std::memory_order_release);
  }
  return Work(std::shared_ptr<detail::WorkState>(std::shared_ptr<void>(), state));
}

}  // namespace maniple
