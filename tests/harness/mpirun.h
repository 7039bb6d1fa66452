// Starting the ranks of a run by an mpirun, as the mpi backend needs it.
//
// They are then no children of ours and inherit no descriptors: each connects to a socket in the run's directory and
// sends its rank. How one ended is known only by whether it reported that it had finished.
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
  std::vector<std::string> program;                      ///< and its arguments
  std::vector<std::pair<std::string, std::string>> env;  ///< for the ranks
  const bench::VirtualNetwork* network = nullptr;        ///< its hosts get the ranks in blocks
  double limit_s = 60;                                   ///< until all ranks have connected
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

/// The rank's part: returns its channel, and its rank as mpirun assigned it.
UniqueFd report_to_run(const std::string& dir, int& rank);

}  // namespace maniple::harness
