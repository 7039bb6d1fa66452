// Which operations MPI does by itself, and how: its non-blocking collectives, so that an abort or a deadline can end the wait.
#pragma once

#include "backend/plugin/mpi/mpi_communicator.h"

namespace maniple::mpi_engine {

bool has_collective(const Operation& operation) noexcept;

struct Setting {
  MPI_Comm communicator;
  int rank;
  int size;
  const AbortToken& abort;
  Deadline deadline;
  std::size_t most;  ///< elements, or bytes of a broadcast, in one call
};

/// False: given up, with a request left behind in MPI.
bool run_collective(const Setting& setting, const Operation& operation);

}  // namespace maniple::mpi_engine
