// Rank and world size from schedulers that do not set RANK: Open MPI, PMI (MPICH, Intel MPI), Slurm. Pure: the
// environment is an argument.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace maniple {

using Lookup = std::function<std::optional<std::string>(const char* name)>;

struct SchedulerAssignment {
  const char* scheduler;  ///< "Slurm"
  const char* rank_name;  ///< the variable, for messages
  const char* world_size_name;
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank = std::nullopt;
  std::optional<int> local_world_size = std::nullopt;
  std::optional<int> node_rank = std::nullopt;
  std::optional<std::string> master_addr = std::nullopt;
  std::optional<std::uint16_t> master_port = std::nullopt;
};

/// The first scheduler whose rank variable is set. Throws InvalidArgument naming a variable with an invalid value.
std::optional<SchedulerAssignment> detect_scheduler(const Lookup& lookup);

/// "node[003-010,012],login1" -> "node003".
std::string first_host(std::string_view node_list);

/// A port below the ephemeral range. It depends only on the job, so all of its ranks get the same port.
std::uint16_t port_for_job(std::string_view job_id) noexcept;

}  // namespace maniple
