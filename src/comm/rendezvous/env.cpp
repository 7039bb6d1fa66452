// env://: reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which PyTorch's launchers set, or a scheduler's
// variables instead.
#include <unistd.h>

#include <cstdlib>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/files.h"
#include "comm/rendezvous/methods.h"
#include "comm/rendezvous/schedulers.h"

namespace maniple {
namespace {

std::optional<int> variable(const char* name, int low, int high) {
  const auto value = environment_integer(name, low, high);
  if (!value) return std::nullopt;
  return static_cast<int>(*value);
}

std::optional<int> given(int option) { return option == -1 ? std::nullopt : std::optional<int>(option); }

[[noreturn]] void throw_missing(const char* name, const char* expected) {
  throw InvalidArgument(
      fmt::format("env://: {} is not set; expected {}. Start with a launcher (maniple run, torchrun, mpirun, "
                  "srun), or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                  name, expected));
}

void check_local(const RankAssignment& assignment, std::optional<int> local_rank, std::optional<int> local_world_size,
                 std::optional<int> node_rank) {
  if (local_world_size) {
    MANIPLE_REQUIRE(*local_world_size <= assignment.world_size,
                    "LOCAL_WORLD_SIZE is {} but WORLD_SIZE is {}; a host cannot have more ranks than the job",
                    *local_world_size, assignment.world_size);
  }
  const int most = local_world_size.value_or(assignment.world_size);
  if (local_rank) {
    MANIPLE_REQUIRE(*local_rank < most, "LOCAL_RANK is {} but {} is {}; expected 0 to {}", *local_rank,
                    local_world_size ? "LOCAL_WORLD_SIZE" : "WORLD_SIZE", most, most - 1);
  }
  if (node_rank) {
    MANIPLE_REQUIRE(*node_rank < assignment.world_size,
                    "NODE_RANK is {} but WORLD_SIZE is {}; every node has at least one rank", *node_rank,
                    assignment.world_size);
    MANIPLE_REQUIRE(local_world_size != assignment.world_size || *node_rank == 0,
                    "NODE_RANK is {} but LOCAL_WORLD_SIZE is {}, which is all of WORLD_SIZE; expected 0", *node_rank,
                    assignment.world_size);
  }
}

bool has_variable(pid_t pid, std::string_view name) {
  const std::string environment = '\0' + file_text(fmt::format("/proc/{}/environ", pid));
  return environment.find(fmt::format("{}{}=", '\0', name)) != std::string::npos;
}

pid_t parent_of(pid_t pid) {
  // "PID (name) state PPID ..."; the name may contain any character.
  const std::string stat = file_text(fmt::format("/proc/{}/stat", pid));
  const auto end = stat.rfind(") ");
  return end == std::string::npos || end + 4 > stat.size() ? 0 : std::atoi(stat.c_str() + end + 4);
}

// The process that started all ranks of this host: the nearest ancestor whose environment lacks `variable`, which the
// launcher sets for its ranks (and thereby for scripts between it and them). The parent, if environments cannot be
// read.
pid_t starter_process(std::string_view variable) {
  pid_t pid = ::getppid();
  while (pid > 1 && has_variable(pid, variable)) {
    const pid_t parent = parent_of(pid);
    if (parent <= 0) break;
    pid = parent;
  }
  return pid;
}

}  // namespace

bool has_no_launcher(const InitOptions& options) {
  if (options.rank != -1 || options.world_size != -1 || options.init_method != "env://") return false;
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    if (std::getenv(name) != nullptr) return false;
  }
  return !detect_scheduler(environment_text);
}

RankAssignment assignment_from_environment(const InitOptions& options) {
  const InitMethod method = parse_init_method(options.init_method);
  MANIPLE_REQUIRE(method.place.empty(), "init method \"{}\": nothing may follow env://", options.init_method);
  const auto option_rank = agreed({"InitOptions::rank", given(options.rank)}, {"the init method's rank", method.rank});
  const auto option_size = agreed({"InitOptions::world_size", given(options.world_size)},
                                  {"the init method's world_size", method.world_size});

  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    require_not_empty(name);
  }
  auto rank = variable("RANK", 0, kMaxWorldSize - 1);
  auto world_size = variable("WORLD_SIZE", 1, kMaxWorldSize);
  auto local_rank = variable("LOCAL_RANK", 0, kMaxWorldSize - 1);
  auto local_world_size = variable("LOCAL_WORLD_SIZE", 1, kMaxWorldSize);
  auto node_rank = variable("NODE_RANK", 0, kMaxWorldSize - 1);
  auto host = environment_text("MASTER_ADDR");
  auto port = variable("MASTER_PORT", 1, 65535);
  std::string rank_name = "RANK";
  std::string size_name = "WORLD_SIZE";

  if (!rank && !world_size) {
    if (const auto assignment = detect_scheduler(environment_text)) {
      rank = assignment->rank;
      world_size = assignment->world_size;
      rank_name = assignment->rank_name;
      size_name = assignment->world_size_name;
      if (!local_rank) local_rank = assignment->local_rank;
      if (!local_world_size) local_world_size = assignment->local_world_size;
      if (!host) host = assignment->master_addr;
      if (!port && assignment->master_port) port = *assignment->master_port;
      // MPICH does not name the job. On one host, the process that started all ranks distinguishes jobs as well.
      if (!port && assignment->local_world_size == assignment->world_size)
        port = port_for_job(fmt::format("process {}", starter_process(assignment->rank_name)));
    }
  }

  // spawn sets RANK and WORLD_SIZE for one machine; a program that passes both to init() computes them for several.
  if (option_rank && option_size && environment_text("MANIPLE_SPAWNED")) {
    rank = option_rank;
    world_size = option_size;
  }
  rank = agreed({rank_name, rank}, {"InitOptions::rank", option_rank});
  world_size = agreed({size_name, world_size}, {"InitOptions::world_size", option_size});
  if (!rank) throw_missing("RANK", "the rank of this process, from 0");
  if (!world_size) throw_missing("WORLD_SIZE", "the number of ranks");
  require_rank_in_world(*rank, rank_name, *world_size, size_name);
  if (!host) throw_missing("MASTER_ADDR", "the name or address of the host of rank 0");
  if (!port) throw_missing("MASTER_PORT", "a free port of that host, 1 to 65535");

  RankAssignment assignment{
      .rank = *rank, .world_size = *world_size, .host = *host, .port = static_cast<std::uint16_t>(*port)};
  check_local(assignment, local_rank, local_world_size, node_rank);
  return assignment;
}

}  // namespace maniple
