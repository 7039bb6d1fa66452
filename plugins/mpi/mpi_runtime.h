// MPI in this process: initialised once and finalised at exit if that is safe. A thread makes progress on sent
// messages.
//
// An abandoned operation leaves requests in MPI that cannot be cancelled, so MPI must not be called again. The runtime
// is then *poisoned*: later calls throw, and the process ends without MPI_Finalize, which might wait for ranks that are
// gone.
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/backend/plugin/plugin.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"

namespace maniple::mpi_plugin {

/// Bytes in transit to another rank. The runtime keeps them alive until MPI is done with them.
struct Packet {
  static constexpr std::size_t kBytes = 64 * 1024;
  explicit Packet(std::size_t size = kBytes) : bytes(std::make_unique_for_overwrite<std::byte[]>(size)) {}
  std::unique_ptr<std::byte[]> bytes;
  MPI_Request request = MPI_REQUEST_NULL;
  std::atomic<bool> in_transit{false};
  bool awaited = true;  // another rank may wait for it
};

class Runtime {
 public:
  /// Initialises MPI at the first call, which waits for all ranks that mpirun started. Throws Unsupported when mpirun
  /// did not start this process, and Timeout when it gives up.
  static Runtime& start(const PluginContext& context);
  /// The runtime. Call start() first.
  static Runtime& get();

  int rank() const noexcept { return rank_; }  ///< in MPI_COMM_WORLD
  int size() const noexcept { return size_; }

  /// Hold the result during every MPI call. Does not lock if MPI allows calls from several threads. Throws Aborted when
  /// poisoned.
  std::unique_lock<std::timed_mutex> enter();

  /// Starts sending the first `size` bytes.
  void send(const std::shared_ptr<Packet>& packet, std::size_t size, int to, int tag, MPI_Comm communicator);
  /// Keeps a packet until its request is done.
  void keep(const std::shared_ptr<Packet>& packet);
  /// Releases the packets whose requests are done.
  void sweep() MANIPLE_EXCLUDES(mutex_);

  /// Call once, when all ranks are known to have returned from MPI_Init.
  void all_have_started();

  /// Watches the other ranks' processes at exit: when one of them has ended, waits are shortened.
  void watch(const std::vector<int>& pids);

  void poison(const std::string& why) noexcept;
  /// A group has failed, and a rank may be gone: do not wait for other ranks at exit.
  void note_failure() noexcept { failed_.store(true); }
  /// A group has failed because a rank left it: wait for the other ranks at exit, but not for long.
  void note_end() noexcept { ended_.store(true); }
  bool usable() const noexcept { return !poisoned_.load() && !finalised_.load() && guard_.owned(); }

 private:
  Runtime();
  static void at_exit(int status, void*);
  static int before_finalize(MPI_Comm, int, void* runtime, void*);
  void finalise(int status);
  bool a_rank_has_ended();          // a watched process has ended
  void limit_finalise(int status);  // body of a thread
  bool await_all_ranks();           // waits until all ranks are about to exit; false: one of them is not
  void linger();                    // waits until sent messages are received
  void progress_sends();            // body of thread_
  void sweep_locked() MANIPLE_REQUIRES(mutex_);

  ForkGuard guard_;  // MPI must not be used in forked children
  int rank_ = 0;
  int size_ = 1;
  bool serialised_ = false;  // MPI allows only one call at a time
  bool ours_ = false;        // this object initialised MPI, so it finalises MPI
  std::timed_mutex calls_;   // not a Mutex, which has no try_lock_for
  std::atomic<bool> poisoned_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> ended_{false};
  std::atomic<bool> finalised_{false};
  std::atomic<bool> has_finalised_{false};  // MPI_Finalize has returned

  Mutex mutex_;
  CondVar changed_;
  std::string why_ MANIPLE_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Packet>> packets_ MANIPLE_GUARDED_BY(mutex_);  // in transit
  std::map<int, std::string> watched_ MANIPLE_GUARDED_BY(mutex_);            // start time by pid
  std::thread thread_;
  bool stopping_ MANIPLE_GUARDED_BY(mutex_) = false;
};

/// Runs `body`, an MPI call that blocks until other ranks take part, in a thread that can be abandoned.
///
/// Waits for the thread, polling the group's abort and the deadline. Rethrows the exception of `body`. Returns false if
/// it gave up; the thread then stays inside MPI until the process ends, so `body` must own everything it uses.
bool run_detached(std::function<void()> body, const AbortToken& abort, Deadline deadline);

/// Throws SystemError with the call and MPI's own text unless `code` is MPI_SUCCESS.
void check(int code, const char* call);

}  // namespace maniple::mpi_plugin
