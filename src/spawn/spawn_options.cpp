#include "spawn/spawn_options.h"

#include <dirent.h>

#include <fmt/format.h>

#include "base/check.h"
#include "base/environment.h"
#include "base/system_error.h"
#include "launch/placement/binding.h"
#include "net/handshake.h"
#include "process/descriptors.h"
#include "rendezvous/secret_source.h"

namespace maniple::launch {
namespace {

constexpr int kMostProcesses = 4096;

bool is_on_several_machines(const SpawnOptions& options) {
  return options.nodes > 1 || options.world_size > options.nprocs;
}

int count_threads() {
  DIR* tasks = ::opendir("/proc/self/task");
  if (tasks == nullptr) throw_system_error("spawn: counting threads in /proc/self/task");
  int count = 0;
  while (const dirent* entry = ::readdir(tasks)) count += entry->d_name[0] != '.';
  ::closedir(tasks);
  return count;
}

/// MASTER_ADDR and MASTER_PORT of the environment are those of another job: this process is one of its ranks.
bool is_a_rank() { return environment_text("LOCAL_RANK").has_value(); }

/// One machine as far as the options tell; but a program may do the arithmetic of several by itself and give init() the
/// rank and the world size, as PyTorch's tutorials do: then the environment names the master.
void take_master_of_environment(NodeEnvironment& node) {
  const auto address = environment_text("MASTER_ADDR");
  const auto port = environment_integer("MASTER_PORT", 1, 65535);
  if (!address || !port) return;
  node.master_addr = *address;
  node.master_port = static_cast<int>(*port);
}

/// The one that the user gave to all machines of the job, if there is one; else, on one machine, one of its own.
std::optional<Secret> secret_for(bool several) {
  std::optional<Secret> secret;
  if (several || !is_a_rank()) secret = secret_from_environment();
  if (!secret && !several) secret = Secret::random();
  return secret;
}

}  // namespace

void check_spawn_options(const SpawnOptions& options) {
  MANIPLE_REQUIRE(options.nprocs >= 1 && options.nprocs <= kMostProcesses,
                  "spawn: nprocs is {}; expected the number of processes, 1 to {}", options.nprocs, kMostProcesses);
  MANIPLE_REQUIRE(options.nodes >= 1, "spawn: nodes is {}; expected the number of machines, 1 or more", options.nodes);
  MANIPLE_REQUIRE(options.node_rank >= 0, "spawn: node_rank is {}; expected 0 or more", options.node_rank);
  MANIPLE_REQUIRE(options.world_size >= 0, "spawn: world_size is {}; expected 0 (nodes * nprocs) or more",
                  options.world_size);
  const std::int64_t world = options.world_size > 0 ? options.world_size : std::int64_t{options.nodes} * options.nprocs;
  const std::int64_t last = (std::int64_t{options.node_rank} + 1) * options.nprocs;
  MANIPLE_REQUIRE(world <= INT32_MAX && last <= world,
                  "spawn: node_rank {} with {} processes needs ranks up to {}, but the world has {} (world_size, or "
                  "nodes * nprocs)",
                  options.node_rank, options.nprocs, last - 1, world);
  MANIPLE_REQUIRE(options.master_port >= 0 && options.master_port <= 65535,
                  "spawn: master_port is {}; expected a port, or 0 for a free one", options.master_port);
  MANIPLE_REQUIRE(options.grace.count() >= 0 && options.grace.count() <= 1e6,
                  "spawn: grace is {} s; expected 0 or more", options.grace.count());
  MANIPLE_REQUIRE(options.start_method == StartMethod::fork || options.start_method == StartMethod::reexec,
                  "spawn: start_method is {}; expected fork or reexec", static_cast<int>(options.start_method));
}

void check_fork_is_safe() {
  const int threads = count_threads();
  if (threads > 1)
    throw Unsupported(
        fmt::format("spawn: start method fork with {} threads in this process: the copies would have their locks but "
                    "not the threads, and "
                    "hang; use StartMethod::reexec, or spawn before threads start (LibTorch and OpenMP start them in "
                    "the first operation)",
                    threads));
}

SpawnRendezvous prepare_rendezvous(const SpawnOptions& options) {
  SpawnRendezvous rendezvous;
  NodeEnvironment& node = rendezvous.node;
  const bool several = is_on_several_machines(options);
  node.master_addr = options.master_addr;
  node.master_port = options.master_port;
  if (several) {
    if (node.master_addr.empty()) node.master_addr = environment_text("MASTER_ADDR").value_or("");
    if (node.master_port == 0)
      node.master_port = static_cast<int>(environment_integer("MASTER_PORT", 1, 65535).value_or(0));
    MANIPLE_REQUIRE(
        !node.master_addr.empty() && node.master_port != 0,
        "spawn: on several machines master_addr and master_port (or MASTER_ADDR and MASTER_PORT) say where machine 0 "
        "is; {} is missing",
        node.master_addr.empty() ? "the address" : "the port");
  } else {
    if (node.master_addr.empty() && node.master_port == 0 && !is_a_rank()) take_master_of_environment(node);
    if (node.master_addr.empty()) node.master_addr = "127.0.0.1";
    if (node.master_port == 0) {
      rendezvous.reservation = reserve_port(Address::parse("127.0.0.1:0"));
      node.master_port = Address::of_socket(rendezvous.reservation.get()).port();
    }
  }
  if (const auto secret = secret_for(several)) {
    rendezvous.secret = sealed_memory("maniple-secret", hex_of(*secret));
    node.secret_fd = rendezvous.secret.get();
  }
  node.cores = allowed_cpu_count();
  return rendezvous;
}

WorkerAssignment assignment_of(const SpawnOptions& options, int index) {
  return {.rank = options.node_rank * options.nprocs + index,
          .node_rank = options.node_rank,
          .local_rank = index,
          .local_size = options.nprocs,
          .world_size = options.world_size > 0 ? options.world_size : options.nodes * options.nprocs};
}

}  // namespace maniple::launch
