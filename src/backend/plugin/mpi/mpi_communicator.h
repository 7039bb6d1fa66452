// The communicator of a group.
#pragma once

#include <optional>

#include "backend/plugin/mpi/mpi_channel.h"

namespace maniple::mpi_engine {

class Communicator {
 public:
  /// All ranks of the group make it together. Throws Unsupported when mpirun's ranks are not those of the job.
  explicit Communicator(const PluginContext& context);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  MPI_Comm get() const noexcept { return communicator_; }
  Party& party() noexcept { return *party_; }
  Course course(int rank, Lane lane);

 private:
  // False: given up.
  bool duplicate_world(MPI_Comm& made, const PluginContext& context);
  bool open_farewells(const PluginContext& context);
  bool create_from(const std::vector<int>& ranks, const PluginContext& context);

  MPI_Comm communicator_ = MPI_COMM_NULL;
  int first_tag_ = 0;
  std::optional<Party> party_;
};

/// Waits for a request, looking at the group's abort and the deadline between looks. False: given up.
bool complete(MPI_Request& request, const AbortToken& abort, Deadline deadline);

}  // namespace maniple::mpi_engine
