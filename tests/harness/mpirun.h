// Starts a run's ranks by mpirun, as the mpi backend requires.
//
// The ranks are then not children of the test and inherit no descriptors. Instead, each rank connects to a socket in
// the run's directory and sends its rank. A rank counts as finished only if it has reported so; its exit is unknown.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/base/unique_fd.h"
#include "tools/bench/virtual_network.h"

namespace maniple::harness {

struct MpiLaunch {
  int n = 2;
  std::string dir;
  std::vector<std::string> program;                      ///< the program and its arguments
  std::vector<std::pair<std::string, std::string>> env;  ///< for the ranks
  const bench::VirtualNetwork* network = nullptr;        ///< its hosts get the ranks in blocks
  double limit_s = 60;                                   ///< time until all ranks must have connected
};

struct MpiRanks {
  struct One {
    pid_t pid = -1;
    UniqueFd channel;
  };
  pid_t launcher = -1;
  std::vector<One> ranks;
};

/// Throws std::runtime_error when not all ranks connect.
MpiRanks start_by_mpirun(const MpiLaunch& launch);

/// The rank's part: returns its channel, and sets `rank` to the rank that mpirun assigned.
UniqueFd report_to_run(const std::string& dir, int& rank);

}  // namespace maniple::harness
