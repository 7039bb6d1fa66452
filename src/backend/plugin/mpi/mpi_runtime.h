// MPI in this process: initialised once, finalised at exit if that is safe, and a thread that brings out what was sent.
//
// An operation that is given up leaves MPI with requests that nothing can take back, so MPI is not called again after that: it
// is *deserted*, later calls throw, and the process ends without MPI_Finalize, which might wait for ranks that are gone.
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend/plugin/plugin.h"

namespace maniple::mpi_engine {

/// Bytes on their way to another rank; kept alive by the runtime until MPI is done with them.
struct Packet {
  static constexpr std::size_t kBytes = 64 * 1024;
  explicit Packet(std::size_t size = kBytes) : bytes(std::make_unique_for_overwrite<std::byte[]>(size)) {}
  std::unique_ptr<std::byte[]> bytes;
  MPI_Request request = MPI_REQUEST_NULL;
  std::atomic<bool> under_way{false};
  bool owed = true;  // somebody may wait for it
};

class Runtime {
 public:
  /// Initialises MPI at the first call, which waits for all ranks that mpirun started. Throws Unsupported when this process was
  /// not started by mpirun, and Timeout when it gives up.
  static Runtime& start(const PluginContext& context);
  /// The same, started before.
  static Runtime& get();

  int rank() const noexcept { return rank_; }  ///< in MPI_COMM_WORLD
  int size() const noexcept { return size_; }

  /// To be held during every call of MPI; does nothing when MPI takes calls of several threads. Throws Aborted when deserted.
  std::unique_lock<std::timed_mutex> enter();

  /// Starts sending the first `size` bytes.
  void send(const std::shared_ptr<Packet>& packet, std::size_t size, int to, int tag, MPI_Comm communicator);
  /// Keeps a packet until its request is done.
  void keep(const std::shared_ptr<Packet>& packet);
  /// Looks which packets are done.
  void sweep();

  /// Told once, when all ranks are known to be through MPI_Init.
  void all_have_started();

  void desert(const std::string& why) noexcept;
  /// A group has failed: at exit nobody is waited for, as a rank may be gone.
  void note_failure() noexcept { failed_.store(true); }
  bool usable() const noexcept { return !deserted_.load() && !finalised_.load(); }

 private:
  Runtime();
  static void at_exit(int status, void*);
  static int before_finalize(MPI_Comm, int, void* runtime, void*);
  void finalise(int status);
  bool await_all();  // to come to their end; false: one of them does not
  void linger();     // for what was sent and may still be taken
  void bring_out();  // the thread
  void sweep_locked();

  int rank_ = 0;
  int size_ = 1;
  bool serialised_ = false;  // MPI takes one call at a time
  bool ours_ = false;        // we initialised it, so we finalise it
  std::timed_mutex calls_;
  std::atomic<bool> deserted_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> finalised_{false};

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::string why_;
  std::vector<std::shared_ptr<Packet>> packets_;  // under way
  std::thread thread_;
  bool stopping_ = false;
};

/// Throws SystemError with the call and MPI's own text unless `code` is MPI_SUCCESS.
void check(int code, const char* call);

}  // namespace maniple::mpi_engine
