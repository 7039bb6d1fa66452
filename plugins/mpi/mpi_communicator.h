// A group's MPI communicator, and its endpoints for byte channels (mpi_channel.h).
#pragma once

#include <optional>

#include "plugins/mpi/mpi_channel.h"

namespace maniple::mpi_plugin {

class Communicator {
 public:
  /// Collective over the group. Throws Unsupported when mpirun's ranks differ from the job's ranks.
  explicit Communicator(const PluginContext& context);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  MPI_Comm get() const noexcept { return communicator_; }
  GroupPeers& peers() noexcept { return *peers_; }
  Endpoint endpoint(int rank, Traffic traffic);

 private:
  // These return false when they gave up.
  bool duplicate_world(MPI_Comm& made, const PluginContext& context);
  bool open_leave_notices(const PluginContext& context);
  bool create_from(const std::vector<int>& ranks, const PluginContext& context);

  MPI_Comm communicator_ = MPI_COMM_NULL;
  int first_tag_ = 0;
  std::optional<GroupPeers> peers_;
};

/// Waits for a request. Returns false on the group's abort or at the deadline.
bool complete(MPI_Request& request, const AbortToken& abort, Deadline deadline);

}  // namespace maniple::mpi_plugin
