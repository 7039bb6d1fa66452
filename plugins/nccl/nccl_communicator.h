// A group's NCCL communicator: set up before a deadline, called by one thread, ended by any thread.
//
// The communicator is *blocking*. A non-blocking one starts an NCCL thread for every call, which made an all_reduce of
// two ranks take 70 us of the caller's time instead of 13. The price is that calls may wait for other ranks:
// - Set-up and memory registration run in a separate thread, which is abandoned when the deadline passes.
// - The first operation of a kind, and the first message to a rank, connect inside the call. `abort` ends that wait.
// NCCL_COMM_BLOCKING=0 in the environment makes the communicator non-blocking; each call is then polled until done.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "comm/backend/device/device_plugin.h"
#include "comm/base/mutex.h"
#include "plugins/nccl/nccl_library.h"

namespace maniple::nccl_plugin {

/// A handle to work in a separate thread; copies refer to the same work. Not a std::future, which uses std::call_once:
/// its inline part may bind to the program's C++ library and its thread-local variable to a C++ library inside the
/// plugin. That combination has crashed.
class Task {
 public:
  Task() = default;  ///< none
  bool valid() const noexcept { return state_ != nullptr; }
  bool wait_for(std::chrono::milliseconds time) const;  ///< returns whether the work is done
  void wait() const;
  void get() const;  ///< waits, and rethrows the exception of the work

 private:
  friend Task on_device(int device, std::function<void()> body);
  struct State;
  std::shared_ptr<State> state_;
};

/// Runs `body` in a separate thread whose current device is `device`. The calling thread's device stays unchanged:
/// switching and restoring it would create a context, which takes memory, on a device the thread may never have used.
Task on_device(int device, std::function<void()> body);

/// Throws SystemError: "cudaMalloc of 64 bytes on cuda:0 failed: out of memory".
void check_cuda(cudaError_t result, const std::string& what);

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// Collective over the group. Throws Timeout naming the ranks that did not arrive, Aborted, SystemError, or
  /// Unsupported when NCCL refuses the group (two of its ranks use one GPU).
  static std::shared_ptr<Communicator> make(const DeviceContext& context);
  ~Communicator() { leave(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  int device() const noexcept { return device_; }

  /// Calls body(comm), which returns NCCL's result. Throws Aborted, PeerLost or SystemError.
  template <class Body>
  void call(const char* what, Body body) {
    const std::lock_guard lock(calls_);
    const ncclComm_t comm = usable(what);
    if (const ncclResult_t result = finished(comm, body(comm)); result != ncclSuccess) fail(what, result);
  }

  /// Runs `body`, which may wait for other ranks, in a separate thread and waits for it. When the deadline passes,
  /// aborts the communicator and throws Timeout.
  void call_within(Deadline deadline, const char* what, std::function<void()> body);

  /// Registers this rank's memory with NCCL until `deregister` or the end of the communicator. With `symmetric` it is
  /// collective: all ranks call it with the same number of bytes, and it waits for them.
  void register_memory(void* memory, std::size_t bytes, bool symmetric);
  void deregister(void* memory) noexcept;

  DeviceFault fault() noexcept;
  void abort() noexcept;
  /// Call when all enqueued work is complete, or after abort. Waits some seconds for NCCL to clean up, which does not
  /// finish while a CUDA graph with one of its operations exists.
  void leave() noexcept;

 private:
  struct Registration {
    void* handle = nullptr;  // NCCL's handle; null: NCCL needs none
    bool window = false;
  };

  Communicator(const DeviceContext& context, ncclComm_t comm, bool polled);

  ncclComm_t usable(const char* what) const;
  ncclResult_t finished(ncclComm_t comm, ncclResult_t result) const noexcept;
  [[noreturn]] void fail(const char* what, ncclResult_t result);
  void end(ncclResult_t (*by)(ncclComm_t)) noexcept;
  void forget(ncclComm_t comm, const Registration& registration) const noexcept;

  std::string group_;
  int rank_ = 0;
  int size_ = 1;
  int device_ = 0;
  bool polled_ = false;  // non-blocking, by NCCL_COMM_BLOCKING=0

  std::timed_mutex calls_;  // held while a thread is inside NCCL with this communicator; Mutex has no try_lock_for
  std::atomic<ncclComm_t> comm_ = nullptr;
  std::map<void*, Registration> registrations_;
  std::atomic<bool> failed_ = false;

  std::atomic<bool> aborted_ = false;
  Mutex ending_;
  Task ended_ MANIPLE_GUARDED_BY(ending_);  // valid once NCCL's clean-up was started
};

}  // namespace maniple::nccl_plugin
