// The MPI communicator of a group, and its endpoints for channels of bytes (mpi_channel.h).
#pragma once

#include <optional>

#include "plugins/mpi/mpi_channel.h"

namespace maniple::mpi_plugin {

class Communicator {
 public:
  /// All ranks of the group make it together. Throws Unsupported when mpirun's ranks are not those of the job.
  explicit Communicator(const PluginContext& context);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  MPI_Comm get() const noexcept { return communicator_; }
  GroupPeers& peers() noexcept { return *peers_; }
  Endpoint endpoint(int rank, Traffic traffic);

 private:
  // False: given up.
  bool duplicate_world(MPI_Comm& made, const PluginContext& context);
  bool open_leave_notices(const PluginContext& context);
  bool create_from(const std::vector<int>& ranks, const PluginContext& context);

  MPI_Comm communicator_ = MPI_COMM_NULL;
  int first_tag_ = 0;
  std::optional<GroupPeers> peers_;
};

/// Waits for a request, the group's abort or the deadline. False: given up.
bool complete(MPI_Request& request, const AbortToken& abort, Deadline deadline);

}  // namespace maniple::mpi_plugin
