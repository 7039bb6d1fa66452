// Runs NVIDIA's Multi-Process Service (MPS), for `--share-gpu`. With MPS, kernels of several processes run on one GPU
// at the same time; without it, the processes take turns in time slices.
//
// The MPS control daemon (nvidia-cuda-mps-control) starts a server (nvidia-cuda-mps-server) when the first process uses
// CUDA. Each job has its own daemon on each node, in a private folder that CUDA finds through two environment
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
  /// Finds the program and creates the folder; starts nothing. Throws InvalidArgument when the program is missing.
  MpsDaemon();
  ~MpsDaemon();  ///< removes the folder; stops nothing
  MpsDaemon(const MpsDaemon&) = delete;
  MpsDaemon& operator=(const MpsDaemon&) = delete;

  /// Starts the daemon, waits until it replies, and sets CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY in the
  /// environment of this process, which must adopt orphans and have no other children. Throws SystemError when the
  /// daemon fails, Aborted when signal_to_end(control); then nothing runs and the folder is removed.
  void start(int control);

  /// Ends the daemon and its servers (its command "quit", then SIGTERM, then SIGKILL) and removes the folder. May be
  /// called in the process that called start() and in its forked children. Only removes the folder if the daemon is
  /// gone.
  void stop() noexcept;

  void remove_folder() const noexcept;

 private:
  struct Process {
    pid_t pid = -1;
    std::uint64_t start = 0;  // distinguishes it from a later process with the same pid
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

/// The signal with which the supervisor, at the other end of the socket `control`, ends the job. SIGKILL if the
/// supervisor is gone; 0: none. Peeks only: the messages stay in the socket.
int signal_to_end(int control);

/// "0,1" for "2,5": a daemon that sees only some GPUs renumbers them, and its clients must use the new numbers. UUIDs
/// stay unchanged. Pure.
std::string renumbered_devices(const std::string& visible);

/// The parent of the job's private folder: `temporary`, or /tmp if socket names in `temporary` would be too long. Pure.
std::string mps_parent_folder(const std::string& temporary);

}  // namespace maniple::launch
