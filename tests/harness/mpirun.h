// Starting the ranks of a run by an mpirun, as the mpi backend needs it.
//
// They are then no children of ours and inherit no descriptors: each connects to a socket in the run's directory and says who
// it is. How one ended is known only by whether it said that it had finished.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "harness/network.h"

namespace maniple::harness {

struct MpiLaunch {
  int n = 2;
  std::string dir;
  std::vector<std::string> program;                        ///< and its arguments
  std::vector<std::pair<std::string, std::string>> env;    ///< for the ranks
  const Network* network = nullptr;                        ///< its hosts get the ranks in blocks
  double limit_s = 60;                                     ///< until all ranks have said who they are
};

struct MpiRanks {
  struct One {
    pid_t pid = -1;
    UniqueFd line;
  };
  pid_t launcher = -1;
  std::vector<One> ranks;
};

/// Throws std::runtime_error when the ranks do not come.
MpiRanks start_by_mpirun(const MpiLaunch& launch);

/// The rank's part: its line, and its rank from what mpirun told it.
UniqueFd report_to_run(const std::string& dir, int& rank);

}  // namespace maniple::harness
