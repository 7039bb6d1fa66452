// Starting one process. It leads a session of its own, dies with its parent, and its outputs are pipes.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "launch/program.h"
#include "launch/worker_environment.h"

namespace maniple::launch {

struct WorkerOrder {
  const Program* program = nullptr;
  const Environment* environment = nullptr;
  std::string folder = {};            ///< where it starts; empty: here
  int input = -1;                     ///< its standard input; -1: nothing to read
  int inherited = -1;                 ///< one more descriptor that it gets, under the same number; -1: none
  const std::vector<int>* cpus = nullptr;  ///< null or empty: any
};

struct StartedWorker {
  pid_t pid = -1;
  UniqueFd out;  ///< non-blocking, close-on-exec; so is `err`
  UniqueFd err;
};

/// Throws SystemError naming the program. To be called by a thread that lives as long as the worker: the worker gets
/// SIGKILL when that thread ends.
StartedWorker start_worker(const WorkerOrder& order);

/// The soft limit of descriptors is raised for `workers` pipes; workers get the original one back.
void make_room_for_workers(int workers);

}  // namespace maniple::launch
