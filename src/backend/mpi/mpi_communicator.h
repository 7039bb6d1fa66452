// The communicator of a group.
#pragma once

#include "backend/mpi/mpi_runtime.h"

namespace maniple::mpi_engine {

class Communicator {
 public:
  /// All ranks of the group make it together. Throws Unsupported when mpirun's ranks are not those of the job.
  explicit Communicator(const CarrierContext& context);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  MPI_Comm get() const noexcept { return communicator_; }

 private:
  // False: given up.
  bool duplicate_world(const CarrierContext& context);
  bool create_from(const std::vector<int>& ranks, const CarrierContext& context);

  MPI_Comm communicator_ = MPI_COMM_NULL;
};

/// Waits for a request, looking at the group's abort and the deadline between looks. False: given up.
bool complete(MPI_Request& request, const Patrol& patrol, Deadline deadline);

}  // namespace maniple::mpi_engine
