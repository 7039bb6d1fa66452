// Whether an mpirun started this process, and what to say when it had to. Seen by the plugin's library too, so all is
// inline.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <string>

namespace maniple {

/// By an mpirun, or by a scheduler that does the same for MPI. Without one MPI would start as a world of one rank.
inline bool started_by_mpirun() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

/// `ranks`: of the job; 0 when that is not known.
inline std::string needs_mpirun(int ranks) {
  return "the mpi backend needs mpirun (plain processes and `maniple run` cannot start MPI): start with `mpirun -n " +
         (ranks > 0 ? std::to_string(ranks) : "N") + " " + program_invocation_name + "`";
}

}  // namespace maniple
