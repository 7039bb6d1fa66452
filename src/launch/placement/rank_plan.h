// Assigns ranks and devices to processes. Pure arithmetic.
//
// With N nodes, G devices per node and D devices per process:
//
//   processes per node  = G / D                  (G must be divisible by D)
//   world size          = N x G / D
//   global rank         = node x G / D + local rank
//   devices of a process = local rank x D, ..., local rank x D + D - 1
//
// With --share-gpu a process has one device, possibly shared: number (local rank x G / processes per node), rounded
// down.
//
// A hostfile may give nodes different numbers of processes. The global rank then counts the processes of all preceding
// nodes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/process/rank_environment.h"

namespace maniple::launch {

/// nullopt if the text is anything else.
std::optional<int> whole_number(std::string_view text);

/// The number of processes of a node and of devices per process (0: devices are not assigned).
struct NodeShape {
  std::string host = {};  ///< for tables and messages; may be empty
  int processes = 1;
  int devices_per_process = 0;
  int shared_devices = 0;  ///< if devices_per_process is 0: devices to share; each process gets one, in blocks
  friend bool operator==(const NodeShape&, const NodeShape&) = default;
};

/// The number of processes of a node. Throws InvalidArgument with the numbers if `devices_per_node` is not divisible by
/// `devices_per_process`.
int processes_for(int devices_per_node, int devices_per_process);

/// Sets the devices of one process in its assignment.
void assign_devices(WorkerAssignment& assignment, int devices_per_process, int shared_devices);

/// All assignments, in rank order. Throws InvalidArgument if there are no processes.
std::vector<WorkerAssignment> plan_ranks(const std::vector<NodeShape>& nodes);

/// "4" or "2:4": how many nodes the job may have.
struct NodeRange {
  int min = 1;
  int max = 1;
  bool elastic() const noexcept { return min != max; }
  friend bool operator==(const NodeRange&, const NodeRange&) = default;
};
NodeRange parse_node_range(std::string_view text);
/// "2:4": how many processes an elastic job may have.
NodeRange parse_elastic_range(std::string_view text);

/// The table that `--explain` prints: a sentence with the sizes, then one line per rank.
std::string explain_plan(const std::vector<NodeShape>& nodes);

inline constexpr int kMaxNodes = 1 << 14;
inline constexpr int kMaxProcessesPerNode = 1 << 14;

}  // namespace maniple::launch
