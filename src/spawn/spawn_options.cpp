#include "spawn/spawn_options.h"

#include <dirent.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <random>

#include <fmt/format.h>

#include "base/check.h"
#include "base/environment.h"
#include "base/system_error.h"
#include "process/descriptors.h"
#include "net/handshake.h"
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

// Bound but not listening: rank 0 can listen there, nobody else is given the port by chance. Below the range from
// which the kernel takes ports by itself.
UniqueFd reserve_loopback_port(int& port) {
  std::random_device random;
  for (int attempt = 0; attempt < 200; ++attempt) {
    UniqueFd socket = above_standard(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) throw_system_error("spawn: socket");
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    port = 20000 + static_cast<int>(random() % 12000);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    // First without SO_REUSEADDR, so that a port which someone else has reserved in this way is not taken.
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) continue;
    const int on = 1;
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
      throw_system_error("spawn: SO_REUSEADDR");
    return socket;
  }
  throw SystemError("spawn: no free port on 127.0.0.1 among 200 tried", EADDRINUSE);
}

/// What the environment says about a endpoint place is about another job: this process is one of its ranks.
bool is_a_rank() { return environment_text("LOCAL_RANK").has_value(); }

/// One machine as far as the options tell; but a program may do the arithmetic of several by itself and give init() the
/// rank and the world size, as PyTorch's tutorials do: then the place that the environment names is the one.
void take_place_of_environment(MasterEndpoint& point) {
  const auto address = environment_text("MASTER_ADDR");
  const auto port = environment_integer("MASTER_PORT", 1, 65535);
  if (!address || !port) return;
  point.address = *address;
  point.port = static_cast<int>(*port);
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
  SpawnRendezvous endpoint;
  const bool several = is_on_several_machines(options);
  endpoint.point.address = options.master_addr;
  endpoint.point.port = options.master_port;
  if (several) {
    if (endpoint.point.address.empty()) endpoint.point.address = environment_text("MASTER_ADDR").value_or("");
    if (endpoint.point.port == 0)
      endpoint.point.port = static_cast<int>(environment_integer("MASTER_PORT", 1, 65535).value_or(0));
    MANIPLE_REQUIRE(
        !endpoint.point.address.empty() && endpoint.point.port != 0,
        "spawn: on several machines master_addr and master_port (or MASTER_ADDR and MASTER_PORT) say where machine 0 "
        "is; {} is missing",
        endpoint.point.address.empty() ? "the address" : "the port");
  } else {
    if (endpoint.point.address.empty() && endpoint.point.port == 0 && !is_a_rank()) take_place_of_environment(endpoint.point);
    if (endpoint.point.address.empty()) endpoint.point.address = "127.0.0.1";
    if (endpoint.point.port == 0) endpoint.reservation = reserve_loopback_port(endpoint.point.port);
  }
  if (const auto secret = secret_for(several)) {
    endpoint.secret = sealed_memory("maniple-secret", hex_of(*secret));
    endpoint.point.secret = endpoint.secret.get();
  }
  return endpoint;
}

int threads_for_each(int nprocs) {
  if (environment_text("OMP_NUM_THREADS")) return 0;
  cpu_set_t mine;
  CPU_ZERO(&mine);
  const int cores = ::sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine)
                                                                    : static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(1, cores / nprocs);
}

}  // namespace maniple::launch
