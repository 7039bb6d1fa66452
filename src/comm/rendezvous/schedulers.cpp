#include "comm/rendezvous/schedulers.h"

#include <charconv>

#include "comm/base/check.h"
#include "comm/rendezvous/methods.h"

namespace maniple {
namespace {

std::optional<int> number(const Lookup& lookup, const char* name, int low, int high) {
  const auto text = lookup(name);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  MANIPLE_REQUIRE(error == std::errc() && end == text->data() + text->size() && value >= low && value <= high,
                  "{} is \"{}\"; expected a whole number from {} to {}", name, *text, low, high);
  return value;
}

std::optional<int> rank_in(const Lookup& lookup, const char* name) {
  return number(lookup, name, 0, kMaxWorldSize - 1);
}
std::optional<int> size_in(const Lookup& lookup, const char* name) { return number(lookup, name, 1, kMaxWorldSize); }

int required_size(const Lookup& lookup, const char* name, const char* rank_name) {
  const auto size = size_in(lookup, name);
  MANIPLE_REQUIRE(size.has_value(), "{} is set but {} is not; expected the number of ranks", rank_name, name);
  return *size;
}

std::optional<SchedulerAssignment> open_mpi(const Lookup& lookup) {
  SchedulerAssignment assignment{
      .scheduler = "Open MPI", .rank_name = "OMPI_COMM_WORLD_RANK", .world_size_name = "OMPI_COMM_WORLD_SIZE"};
  const auto rank = rank_in(lookup, assignment.rank_name);
  if (!rank) return std::nullopt;
  assignment.rank = *rank;
  assignment.world_size = required_size(lookup, assignment.world_size_name, assignment.rank_name);
  assignment.local_rank = rank_in(lookup, "OMPI_COMM_WORLD_LOCAL_RANK");
  assignment.local_world_size = size_in(lookup, "OMPI_COMM_WORLD_LOCAL_SIZE");
  if (const auto job = lookup("PMIX_NAMESPACE")) assignment.master_port = port_for_job(*job);
  return assignment;
}

std::optional<SchedulerAssignment> slurm(const Lookup& lookup) {
  SchedulerAssignment assignment{.scheduler = "Slurm", .rank_name = "SLURM_PROCID", .world_size_name = "SLURM_NTASKS"};
  const auto rank = rank_in(lookup, assignment.rank_name);
  if (!rank) return std::nullopt;
  // A step may run fewer tasks than the job requested.
  if (lookup("SLURM_STEP_NUM_TASKS")) assignment.world_size_name = "SLURM_STEP_NUM_TASKS";
  assignment.rank = *rank;
  assignment.world_size = required_size(lookup, assignment.world_size_name, assignment.rank_name);
  assignment.local_rank = rank_in(lookup, "SLURM_LOCALID");
  assignment.node_rank = rank_in(lookup, "SLURM_NODEID");
  auto nodes = lookup("SLURM_STEP_NODELIST");
  if (!nodes) nodes = lookup("SLURM_JOB_NODELIST");
  if (nodes) assignment.master_addr = first_host(*nodes);
  if (const auto job = lookup("SLURM_JOB_ID")) assignment.master_port = port_for_job(*job);
  return assignment;
}

std::optional<SchedulerAssignment> pmi(const Lookup& lookup) {
  SchedulerAssignment assignment{.scheduler = "PMI", .rank_name = "PMI_RANK", .world_size_name = "PMI_SIZE"};
  const auto rank = rank_in(lookup, assignment.rank_name);
  if (!rank) return std::nullopt;
  assignment.rank = *rank;
  assignment.world_size = required_size(lookup, assignment.world_size_name, assignment.rank_name);
  assignment.local_rank = rank_in(lookup, "MPI_LOCALRANKID");
  assignment.local_world_size = size_in(lookup, "MPI_LOCALNRANKS");
  return assignment;
}

}  // namespace

std::optional<SchedulerAssignment> detect_scheduler(const Lookup& lookup) {
  // Open MPI and MPICH may have been started inside a Slurm job: then the inner launcher's values are right.
  std::optional<SchedulerAssignment> assignment = open_mpi(lookup);
  if (!assignment) assignment = pmi(lookup);
  if (!assignment) assignment = slurm(lookup);
  if (!assignment) return std::nullopt;
  require_rank_in_world(assignment->rank, assignment->rank_name, assignment->world_size, assignment->world_size_name);
  if (!assignment->master_addr && assignment->local_world_size == assignment->world_size)
    assignment->master_addr = "127.0.0.1";
  return assignment;
}

std::string first_host(std::string_view node_list) {
  std::string host;
  std::size_t i = 0;
  while (i < node_list.size() && node_list[i] != ',') {
    if (node_list[i] != '[') {
      host += node_list[i++];
      continue;
    }
    const auto close = node_list.find(']', i);
    MANIPLE_REQUIRE(close != std::string_view::npos, "the node list \"{}\" has a [ without ]", node_list);
    const std::string_view ranges = node_list.substr(i + 1, close - i - 1);
    host += ranges.substr(0, ranges.find_first_of(",-"));
    i = close + 1;
  }
  MANIPLE_REQUIRE(!host.empty(), "the node list \"{}\" names no host", node_list);
  return host;
}

std::uint16_t port_for_job(std::string_view job_id) noexcept {
  constexpr std::uint32_t kFirst = 15000;
  constexpr std::uint32_t kCount = 15000;  // ends before the ephemeral range
  std::uint32_t hash = 2166136261u;
  for (const char c : job_id) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return static_cast<std::uint16_t>(kFirst + hash % kCount);
}

}  // namespace maniple
