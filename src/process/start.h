// Starting one process. It leads a session of its own, dies with its parent, and its outputs are pipes, or its standard
// output is a terminal: see WorkerOrder.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "process/program.h"
#include "process/rank_environment.h"

namespace maniple::launch {

struct WorkerOrder {
  const Program* program = nullptr;
  const Environment* environment = nullptr;
  std::string folder = {};            ///< where it starts; empty: here
  int input = -1;                     ///< its standard input; -1: nothing to read
  std::vector<int> inherited = {};    ///< more descriptors that it gets, under the same numbers; negative ones are none
  const std::vector<int>* cpus = nullptr;  ///< null or empty: any
  /// Its standard output is a pseudo-terminal: the C library then writes each line as it is printed, where it would keep
  /// some KiB for a pipe and lose them when the program aborts. Bytes pass unchanged (no echo, no CR LF); it is nobody's
  /// controlling terminal. A pipe all the same where there are no pseudo-terminals to be had.
  bool terminal = false;
};

struct StartedWorker {
  pid_t pid = -1;
  UniqueFd out;  ///< non-blocking, close-on-exec; so is `err`
  UniqueFd err;
};

/// Throws SystemError naming the program, ProgramError when it cannot be executed. To be called by a thread that lives as long as the worker: the worker gets
/// SIGKILL when that thread ends.
StartedWorker start_worker(const WorkerOrder& order);

/// The soft limit of descriptors is raised for `workers` pipes; workers get the original one back.
void make_room_for_workers(int workers);

}  // namespace maniple::launch
