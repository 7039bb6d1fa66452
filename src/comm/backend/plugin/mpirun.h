// Detects whether mpirun started this process, and makes the error text for when it did not. Everything is inline, as
// the plugin's library includes this header, too.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <string>

namespace maniple {

/// True under mpirun, or under a scheduler that acts like it. Otherwise MPI would start as a world of one rank.
inline bool started_by_mpirun() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

/// `ranks`: size of the job; 0 if unknown.
inline std::string needs_mpirun(int ranks) {
  return "the mpi backend needs mpirun (plain processes and `maniple run` cannot start MPI): start with `mpirun -n " +
         (ranks > 0 ? std::to_string(ranks) : "N") + " " + program_invocation_name + "`";
}

}  // namespace maniple
