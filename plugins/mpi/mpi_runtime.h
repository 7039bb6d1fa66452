// MPI in this process: initialised once, finalised at exit if that is safe, and a thread that makes progress on what
// was sent.
//
// An operation that is given up leaves MPI with requests that cannot be cancelled, so MPI is not called again after
// that: it is *poisoned*, later calls throw, and the process ends without MPI_Finalize, which might wait for ranks that
// are gone.
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

/// Bytes in transit to another rank; kept alive by the runtime until MPI is done with them.
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
  /// Initialises MPI at the first call, which waits for all ranks that mpirun started. Throws Unsupported when this
  /// process was not started by mpirun, and Timeout when it gives up.
  static Runtime& start(const PluginContext& context);
  /// The same, started before.
  static Runtime& get();

  int rank() const noexcept { return rank_; }  ///< in MPI_COMM_WORLD
  int size() const noexcept { return size_; }

  /// To be held during every call of MPI; does nothing when MPI takes calls of several threads. Throws Aborted when
  /// poisoned.
  std::unique_lock<std::timed_mutex> enter();

  /// Starts sending the first `size` bytes.
  void send(const std::shared_ptr<Packet>& packet, std::size_t size, int to, int tag, MPI_Comm communicator);
  /// Keeps a packet until its request is done.
  void keep(const std::shared_ptr<Packet>& packet);
  /// Releases the packets whose requests are done.
  void sweep() MANIPLE_EXCLUDES(mutex_);

  /// To be called once, when all ranks are known to have returned from MPI_Init.
  void all_have_started();

  /// Processes whose end shows at exit that nobody needs to be waited for.
  void watch(const std::vector<int>& pids);

  void poison(const std::string& why) noexcept;
  /// A group has failed, and a rank may be gone: at exit none is waited for.
  void note_failure() noexcept { failed_.store(true); }
  /// A group has failed because a rank left it: at exit the others are waited for, but not for long.
  void note_end() noexcept { ended_.store(true); }
  bool usable() const noexcept { return !poisoned_.load() && !finalised_.load() && guard_.owned(); }

 private:
  Runtime();
  static void at_exit(int status, void*);
  static int before_finalize(MPI_Comm, int, void* runtime, void*);
  void finalise(int status);
  bool a_rank_has_ended();          // one that is watched
  void limit_finalise(int status);  // the thread
  bool await_all_ranks();           // until they are about to exit; false: one of them is not
  void linger();                    // for what was sent and may still be received
  void progress_sends();            // the thread
  void sweep_locked() MANIPLE_REQUIRES(mutex_);

  ForkGuard guard_;  // MPI knows nothing of the children of this process
  int rank_ = 0;
  int size_ = 1;
  bool serialised_ = false;  // MPI takes one call at a time
  bool ours_ = false;        // we initialised it, so we finalise it
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
  std::map<int, std::string> watched_ MANIPLE_GUARDED_BY(mutex_);            // pid, and when it was started
  std::thread thread_;
  bool stopping_ MANIPLE_GUARDED_BY(mutex_) = false;
};

/// For calls of MPI that block until other ranks take part, made in a thread that can be left behind.
///
/// Runs `body` in a thread of its own and waits for it, polling the group's abort and the deadline. What `body` throws
/// is thrown here. False: given up; the thread stays inside MPI until the process ends, so `body` must own all that it
/// uses.
bool run_detached(std::function<void()> body, const AbortToken& abort, Deadline deadline);

/// Throws SystemError with the call and MPI's own text unless `code` is MPI_SUCCESS.
void check(int code, const char* call);

}  // namespace maniple::mpi_plugin
