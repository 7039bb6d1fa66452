#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "base/check.h"
#include "base/environment.h"
#include "base/system_error.h"
#include "launch/conduct.h"
#include "launch/front.h"
#include "launch/launch_options.h"
#include "launch/meeting_point.h"
#include "launch/program.h"
#include "launch/remote_start.h"
#include "rendezvous/secret_source.h"

namespace maniple::launch {
namespace {

constexpr int kUsage = 2;

/// The secret that launchers of several nodes share: from the file, or from what the environment names.
Secret shared_secret(const LaunchOptions& options) {
  if (!options.secret_file.empty()) ::setenv("MANIPLE_SECRET_FILE", options.secret_file.c_str(), 1);
  return secret_from_environment().value_or(Secret::none());
}

void check(const LaunchOptions& options) {
  MANIPLE_REQUIRE(!options.command.empty(), "no program given; expected: maniple run [options] PROGRAM [arguments]");
  MANIPLE_REQUIRE(options.nodes.max == 1 || options.master || !options.hosts.empty(),
                  "--nnodes {} needs --master HOST:PORT, the address of node 0 (or --hosts)", options.nodes.max);
  MANIPLE_REQUIRE(options.node_rank < options.nodes.max, "--node-rank is {} but --nnodes is {}; expected 0 to {}",
                  options.node_rank, options.nodes.max, options.nodes.max - 1);
  if (options.hosts.empty() || is_this_host(options.hosts.front().host)) {
    const char* path = std::getenv("PATH");
    find_program(options.command, path != nullptr ? path : "/usr/bin:/bin");
  }
  if (!options.folder.empty() && options.hosts.empty()) {
    MANIPLE_REQUIRE(::access(options.folder.c_str(), X_OK) == 0, "--cwd {}: {}", options.folder, errno_text(errno));
  }
}

int conduct_hosts(const LaunchOptions& options, UniqueFd control) {
  UniqueFd listener = listen_on(address_towards(options.hosts));
  return conduct(options, std::move(control), std::move(listener), Secret::random());
}

int run_agent(const LaunchOptions& options, UniqueFd control) {
  if (!options.hosts.empty()) return conduct_hosts(options, std::move(control));
  if (options.nodes.max == 1) return conduct(options, std::move(control), {}, Secret::random());
  const Secret secret = shared_secret(options);
  UniqueFd listener;
  if (options.node_rank <= 0) {
    const bool anyone = options.node_rank < 0;
    try {
      listener = listen_as_master(*options.master, secret, anyone, Deadline::after(options.join_timeout));
    } catch (const SystemError& error) {
      throw InvalidArgument(fmt::format("--master {}:{}: {}", options.master->host, options.master->port, error.what()));
    }
    MANIPLE_REQUIRE(listener || anyone,
                    "--master is {}, which is not an address of this host; --node-rank 0 belongs on that host",
                    options.master->host);
  }
  if (listener) return conduct(options, std::move(control), std::move(listener), secret);
  return follow(options, std::move(control), secret);
}

}  // namespace

std::vector<NodeShape> planned_nodes(const LaunchOptions& options) {
  std::vector<NodeShape> nodes;
  for (const HostSlots& host : options.hosts) {
    nodes.push_back({.host = host.host,
                     .processes = host.slots > 0 ? host.slots : options.processes,
                     .devices_per_process = options.devices_per_process});
  }
  if (nodes.empty()) {
    nodes.assign(static_cast<std::size_t>(options.nodes.max),
                 {.host = {}, .processes = options.processes, .devices_per_process = options.devices_per_process});
  }
  return nodes;
}

int launch(const LaunchOptions& options) {
  check(options);
  return run_behind_front([&](UniqueFd control) { return run_agent(options, std::move(control)); });
}

int serve_as_agent(const std::string& conductor, int node_rank) {
  const MasterPlace place = parse_master(conductor);
  std::string line;
  char byte = 0;
  while (line.size() < 128 && ::read(STDIN_FILENO, &byte, 1) == 1 && byte != '\n') line.push_back(byte);
  const auto secret = parse_secret(line);
  if (!secret) {
    fmt::print(stderr, "maniple: run-agent is started by `maniple run --hosts`, which passes the secret on its input\n");
    return kUsage;
  }
  return run_behind_front(
      [&](UniqueFd control) { return follow_as_agent(place, node_rank, std::move(control), *secret); });
}

}  // namespace maniple::launch
