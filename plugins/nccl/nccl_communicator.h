// The NCCL communicator of a group: set up before a deadline, called by one thread, ended by any.
//
// It is a *blocking* communicator. A non-blocking one starts a thread of NCCL for every call, which made an all_reduce
// of two ranks take 70 us of the caller's time instead of 13. What a blocking one costs is that calls may wait for
// other ranks:
//   setting up, and registering memory, run in a thread of their own, which is left to itself when the deadline passes;
//   the first operation of a kind, and the first message to a rank, make connections inside the call. `abort` ends that
//   wait.
// NCCL_COMM_BLOCKING=0 in the environment makes it non-blocking all the same; then each call is polled until it is
// done.
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

/// What a thread of its own does; copies are of the same. Not a std::future: that uses std::call_once, whose inline
/// part may be bound to the program's copy and whose variable of the thread to the one of a C++ library inside the
/// plugin, which crashes (seen).
class Task {
 public:
  Task() = default;  ///< none
  bool valid() const noexcept { return state_ != nullptr; }
  bool wait_for(std::chrono::milliseconds time) const;  ///< whether it is done
  void wait() const;
  void get() const;  ///< waits, and throws what it threw

 private:
  friend Task on_device(int device, std::function<void()> body);
  struct State;
  std::shared_ptr<State> state_;
};

/// Runs `body` in a thread of its own whose current device is `device`. The calling thread's stays as it is: to put it
/// back would make a context, which takes memory, on a device that the thread may never have used.
Task on_device(int device, std::function<void()> body);

/// Throws SystemError: "cudaMalloc of 64 bytes on cuda:0 failed: out of memory".
void check_cuda(cudaError_t result, const std::string& what);

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// All ranks of the group call it. Throws Timeout, naming the ranks that did not arrive, Aborted, Unsupported when
  /// NCCL refuses the group (two of its ranks use one GPU), SystemError.
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

  /// Waits for `body`, in a thread of its own, which may wait for other ranks. When the deadline passes it aborts the
  /// communicator and throws Timeout.
  void call_within(Deadline deadline, const char* what, std::function<void()> body);

  /// Memory of this rank, known to NCCL until `deregister` or the end of the communicator. With `symmetric` all ranks
  /// call it together, with the same number of bytes, and it waits for them.
  void register_memory(void* memory, std::size_t bytes, bool symmetric);
  void deregister(void* memory) noexcept;

  DeviceFault fault() noexcept;
  void abort() noexcept;
  /// When all that was enqueued is complete, or after abort. Waits for NCCL to clean up, for some seconds; in vain as
  /// long as there is a CUDA graph with one of its operations.
  void leave() noexcept;

 private:
  struct Registration {
    void* handle = nullptr;  // of NCCL; null: NCCL wants none
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
  bool polled_ = false;  // non-blocking, by the user's wish

  std::timed_mutex calls_;  // held while a thread is inside NCCL with this communicator; Mutex has no try_lock_for
  std::atomic<ncclComm_t> comm_ = nullptr;
  std::map<void*, Registration> registrations_;
  std::atomic<bool> failed_ = false;

  std::atomic<bool> aborted_ = false;
  Mutex ending_;
  Task ended_ MANIPLE_GUARDED_BY(ending_);  // valid once NCCL was asked to end it
};

}  // namespace maniple::nccl_plugin
