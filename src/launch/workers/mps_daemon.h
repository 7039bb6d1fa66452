// NVIDIA's Multi-Process Service (MPS), for `--share-gpu`: with it the kernels of several processes run on one GPU at
// the same time; without it the processes have the whole GPU in turns, in time slices.
//
// Its control daemon (nvidia-cuda-mps-control) starts a server (nvidia-cuda-mps-server) when the first process uses
// CUDA. Here each job has a daemon of its own on each node, in a private folder, which CUDA finds by two environment
// variables.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/process/rank_environment.h"
#include <maniple/comm/deadline.h>

namespace maniple::launch {

class MpsDaemon {
 public:
  /// Finds the program and makes the folder; starts nothing. Throws InvalidArgument when the program is not there.
  MpsDaemon();
  ~MpsDaemon();  ///< removes the folder; stops nothing
  MpsDaemon(const MpsDaemon&) = delete;
  MpsDaemon& operator=(const MpsDaemon&) = delete;

  /// Starts the daemon, waits until it answers, and sets CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY in the
  /// environment of this process, which must adopt orphans and have no other children. Throws SystemError when the
  /// daemon fails, Aborted when signal_to_end(control); then nothing runs and the folder is gone.
  void start(int control);

  /// Ends the daemon and its servers (its command "quit", then SIGTERM, then SIGKILL) and removes the folder. From
  /// whichever process was there when it was started, or is a child of one; does nothing when it is gone already.
  void stop() noexcept;

  void remove_folder() const noexcept;

 private:
  struct Process {
    pid_t pid = -1;
    std::uint64_t start = 0;  // so that another process of that number is not taken for it
  };

  std::optional<int> run(const std::string& script, Deadline deadline, int control) const;
  std::vector<Process> family() const;
  bool await_end(const std::vector<Process>& processes, Deadline deadline) const;
  std::string last_line() const;
  void set_variables() const;

  std::string program_;
  std::string folder_;
  Environment environment_;      // of the daemon
  std::vector<Process> daemon_;  // after start()
};

/// The signal by which the supervisor, at the other end of the socket `control`, ends the job: SIGKILL when it is gone;
/// 0: none. What it has sent is not taken out of the socket.
int signal_to_end(int control);

/// "0,1" for "2,5": a daemon that sees only some GPUs numbers them again, and its clients must use those numbers. Names
/// that are no numbers (UUIDs) stay as they are. Pure.
std::string renumbered_devices(const std::string& visible);

/// Where the job's private folder is made: `temporary` unless the names of sockets in it would be too long, else /tmp.
/// Pure.
std::string mps_parent_folder(const std::string& temporary);

}  // namespace maniple::launch
