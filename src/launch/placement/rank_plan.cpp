#include "launch/placement/rank_plan.h"

#include <charconv>
#include <cstdint>

#include <fmt/format.h>

#include "comm/base/check.h"

namespace maniple::launch {

std::optional<int> whole_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

namespace {

std::string devices_of(const WorkerAssignment& assignment) {
  if (assignment.device_count == 0) return "-";
  std::string list;
  for (int i = 0; i < assignment.device_count; ++i) {
    list += fmt::format("{}{}", i == 0 ? "" : ",", assignment.first_device + i);
  }
  return list;
}

std::string counted(std::size_t count, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

}  // namespace

int processes_for(int devices_per_node, int devices_per_process) {
  MANIPLE_REQUIRE(devices_per_node >= 1, "{} devices per node; expected at least 1", devices_per_node);
  MANIPLE_REQUIRE(devices_per_process >= 1, "{} devices per process; expected at least 1", devices_per_process);
  MANIPLE_REQUIRE(devices_per_node % devices_per_process == 0,
                  "{} devices per node cannot be shared out evenly with {} devices per process: {} would be left over",
                  devices_per_node, devices_per_process, devices_per_node % devices_per_process);
  return devices_per_node / devices_per_process;
}

void assign_devices(WorkerAssignment& assignment, int devices_per_process, int shared_devices) {
  const bool shared = devices_per_process == 0 && shared_devices > 0;
  assignment.device_count = shared ? 1 : devices_per_process;
  const std::int64_t before = std::int64_t{assignment.local_rank} * (shared ? shared_devices : devices_per_process);
  assignment.first_device = static_cast<int>(shared ? before / assignment.local_size : before);
}

std::vector<WorkerAssignment> plan_ranks(const std::vector<NodeShape>& nodes) {
  int world_size = 0;
  for (const NodeShape& node : nodes) {
    MANIPLE_REQUIRE(node.processes >= 1 && node.processes <= kMaxProcessesPerNode,
                    "{} processes on a node; expected 1 to {}", node.processes, kMaxProcessesPerNode);
    world_size += node.processes;
  }
  MANIPLE_REQUIRE(world_size >= 1, "a job without nodes has no ranks");
  std::vector<WorkerAssignment> assignments;
  assignments.reserve(static_cast<std::size_t>(world_size));
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    for (int local = 0; local < nodes[node].processes; ++local) {
      assignments.push_back({.rank = static_cast<int>(assignments.size()),
                             .node_rank = static_cast<int>(node),
                             .local_rank = local,
                             .local_size = nodes[node].processes,
                             .world_size = world_size});
      assign_devices(assignments.back(), nodes[node].devices_per_process, nodes[node].shared_devices);
    }
  }
  return assignments;
}

namespace {

/// Empty: not a range from 1 to `most`.
std::optional<NodeRange> range_of(std::string_view text, int most) {
  const auto colon = text.find(':');
  const auto low = whole_number(text.substr(0, colon));
  const auto high = colon == std::string_view::npos ? low : whole_number(text.substr(colon + 1));
  if (!low || !high || *low < 1 || *high < *low || *high > most) return std::nullopt;
  return NodeRange{.min = *low, .max = *high};
}

}  // namespace

NodeRange parse_node_range(std::string_view text) {
  const auto range = range_of(text, kMaxNodes);
  MANIPLE_REQUIRE(range, "--nnodes is \"{}\"; expected a number of nodes (2) or a range (2:4) from 1 to {}", text,
                  kMaxNodes);
  return *range;
}

NodeRange parse_elastic_range(std::string_view text) {
  const auto range = range_of(text, kMaxProcessesPerNode);
  MANIPLE_REQUIRE(range && text.find(':') != std::string_view::npos,
                  "--elastic is \"{}\"; expected the smallest and the largest number of processes, such as 2:8", text);
  return *range;
}

std::string explain_plan(const std::vector<NodeShape>& nodes) {
  const std::vector<WorkerAssignment> assignments = plan_ranks(nodes);
  std::string text =
      fmt::format("{} on {}\n\n", counted(assignments.size(), "rank", "ranks"), counted(nodes.size(), "node", "nodes"));
  bool hosts = false;
  for (const NodeShape& node : nodes) hosts = hosts || !node.host.empty();
  std::size_t width = 4;
  for (const NodeShape& node : nodes) width = std::max(width, node.host.size());
  text += fmt::format("{:>6} {:>6} {:>11}  ", "rank", "node", "local rank");
  if (hosts) text += fmt::format("{:<{}}  ", "host", width);
  text += "devices\n";
  for (const WorkerAssignment& assignment : assignments) {
    text += fmt::format("{:>6} {:>6} {:>11}  ", assignment.rank, assignment.node_rank, assignment.local_rank);
    if (hosts) text += fmt::format("{:<{}}  ", nodes[static_cast<std::size_t>(assignment.node_rank)].host, width);
    text += devices_of(assignment) + "\n";
  }
  return text;
}

}  // namespace maniple::launch
