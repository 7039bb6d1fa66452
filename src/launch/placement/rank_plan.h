// Which process gets which rank and which devices: pure arithmetic.
//
// With N nodes, G devices on each and D devices for each process:
//
//   processes per node  = G / D                  (G must be divisible by D)
//   world size          = N x G / D
//   global rank         = node x G / D + local rank
//   devices of a process = local rank x D, ..., local rank x D + D - 1
//
// With --share-gpu a process has one device, which it may share: number (local rank x G / processes of the node),
// rounded down.
//
// Nodes need not have the same number of processes (a hostfile may say so); then the global rank counts the processes
// of all nodes before.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/process/rank_environment.h"

namespace maniple::launch {

/// How many processes a node has, and how many devices each of them gets (0: devices are not shared out).
struct NodeShape {
  std::string host = {};  ///< for tables and messages; may be empty
  int processes = 1;
  int devices_per_process = 0;
  int shared_devices = 0;  ///< where devices_per_process is 0: so many are dealt in blocks, one to each process
  friend bool operator==(const NodeShape&, const NodeShape&) = default;
};

/// Processes of a node with G devices when each process gets D. Throws InvalidArgument with the numbers if G is not
/// divisible by D.
int processes_for(int devices_per_node, int devices_per_process);

/// The devices of one process of a node, as a part of its assignment.
void assign_devices(WorkerAssignment& assignment, int devices_per_process, int shared_devices);

/// All assignments, in the order of ranks. Throws InvalidArgument if there is no process at all.
std::vector<WorkerAssignment> plan_ranks(const std::vector<NodeShape>& nodes);

/// "4" or "2:4": how many nodes the job may have.
struct NodeRange {
  int min = 1;
  int max = 1;
  bool elastic() const noexcept { return min != max; }
  friend bool operator==(const NodeRange&, const NodeRange&) = default;
};
NodeRange parse_node_range(std::string_view text);

/// The table that `--explain` prints: a sentence with the sizes, then a line for each rank.
std::string explain_plan(const std::vector<NodeShape>& nodes);

inline constexpr int kMaxNodes = 1 << 14;
inline constexpr int kMaxProcessesPerNode = 1 << 14;

}  // namespace maniple::launch
