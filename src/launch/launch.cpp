#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/own_variables.h"
#include "comm/base/system_error.h"
#include "comm/group/environment_check.h"
#include "comm/net/address.h"
#include "comm/rendezvous/secret_source.h"
#include "launch/coordinate/agents.h"
#include "launch/coordinate/job_settings.h"
#include "launch/coordinate/launcher_listener.h"
#include "launch/coordinate/remote_start.h"
#include "launch/launch_options.h"
#include "launch/process/program.h"
#include "launch/workers/mps_daemon.h"
#include "launch/workers/supervisor.h"

namespace maniple::launch {
namespace {

constexpr int kUsage = 2;

/// The secret that the launchers of several nodes share, from --secret-file or from the environment.
Secret shared_secret(const LaunchOptions& options) {
  const std::string& path = options.secret_file;
  if (!path.empty()) return secret_from_file(path, fmt::format("--secret-file is \"{}\"", path));
  return secret_from_environment().value_or(Secret::none());
}

/// Checks the environment that workers inherit once, before any worker is started and refuses it on its own.
void check_variables(const LaunchOptions& options) {
  const Environment environment = worker_group_settings(options).environment;
  warn_of_unknown_variables_for_children(environment);
  require_good_knobs(
      [&](const char* name) -> std::optional<std::string> {
        const std::string* entry = find_variable(environment, name);
        const std::string value = entry != nullptr ? entry->substr(std::strlen(name) + 1) : "";
        return value.empty() ? std::nullopt : std::optional<std::string>(value);
      },
      options.hosts.empty());
}

void check(const LaunchOptions& options) {
  MANIPLE_REQUIRE(!options.command.empty(), "no program given; expected: maniple run [options] PROGRAM [arguments]");
  MANIPLE_REQUIRE(options.nodes.max == 1 || options.master || !options.hosts.empty(),
                  "--nnodes {} needs --master HOST:PORT, the address of node 0 (or --hosts)", options.nodes.max);
  MANIPLE_REQUIRE(options.node_rank < options.nodes.max, "--node-rank is {} but --nnodes is {}; expected 0 to {}",
                  options.node_rank, options.nodes.max, options.nodes.max - 1);
  if (options.elastic) {
    const bool one_node = options.nodes.max == 1 && options.hosts.empty();
    MANIPLE_REQUIRE(!one_node || (options.processes >= options.elastic.min && options.processes <= options.elastic.max),
                    "--elastic is {}:{}, and -n {}; expected a number of processes in that range", options.elastic.min,
                    options.elastic.max, options.processes);
  }
  if (options.hosts.empty() || is_this_host(options.hosts.front().host)) {
    const char* path = std::getenv("PATH");
    find_program(options.command, path != nullptr ? path : "/usr/bin:/bin");
  }
  if (!options.folder.empty() && options.hosts.empty()) {
    MANIPLE_REQUIRE(::access(options.folder.c_str(), X_OK) == 0, "--cwd {}: {}", options.folder, errno_text(errno));
  }
  if (!options.log_folder.empty() && options.hosts.empty()) make_log_folder(options.log_folder);
  check_variables(options);
}

/// This launcher's role in the job, determined before anything is started.
struct LauncherRole {
  UniqueFd listener = {};  // empty: it is a member, or the job has one node
  Address master = {};     // one node: where rank 0 listens
  Secret secret = {};
  bool member = false;
  bool taken = false;  // another process listens at the master's address, on this host
};

LauncherRole find_role(const LaunchOptions& options, int cancel) {
  if (!options.hosts.empty()) {
    return {.listener = listen_on(address_towards(options.hosts, cancel)), .secret = Secret::random()};
  }
  if (options.nodes.max == 1) {
    return {.master = options.master ? own_address(*options.master, cancel) : Address::parse("127.0.0.1:0"),
            .secret = Secret::random()};
  }
  const Secret secret = shared_secret(options);
  if (options.node_rank > 0) return {.secret = secret, .member = true};
  const bool anyone = options.node_rank < 0;
  try {
    MasterListener place =
        listen_as_master(*options.master, secret, anyone, Deadline::after(options.join_timeout), cancel);
    MANIPLE_REQUIRE(place.fd || anyone,
                    "--master is {}, which is not an address of this host; --node-rank 0 belongs on that host",
                    options.master->host);
    const bool member = !place.fd;
    return {.listener = std::move(place.fd), .secret = secret, .member = member, .taken = place.taken};
  } catch (const SystemError& error) {
    throw InvalidArgument(fmt::format("--master {}: {}", to_string(*options.master), error.what()));
  }
}

int run_agent(const LaunchOptions& options, UniqueFd control) {
  LauncherRole role;
  try {
    role = find_role(options, control.get());
  } catch (const Aborted&) {
    unsigned char signal = SIGTERM;
    const ssize_t got = ::read(control.get(), &signal, 1);
    return 128 + (got == 1 ? signal : SIGTERM);
  }
  if (!role.member) {
    return run_coordinator(options, std::move(control), std::move(role.listener), role.master, role.secret);
  }
  try {
    return run_member(options, std::move(control), role.secret);
  } catch (const Error& error) {
    if (!role.taken) throw;
    const auto holder = describe_port_holder(options.master->port);
    throw InvalidArgument(fmt::format("--master {}: the port is taken{}: {}", to_string(*options.master),
                                      holder ? " by " + *holder : "", error.what()));
  }
}

/// This node's MPS daemon, not yet started. Null if the user runs one, or with --hosts, where agents start their own.
std::unique_ptr<MpsDaemon> make_daemon(const LaunchOptions& options) {
  if (!options.share_gpu) return nullptr;
  const std::string given = given_mps_folder(options);
  if (!given.empty()) {
    fmt::print(stderr,
               "maniple: --share-gpu: CUDA_MPS_PIPE_DIRECTORY is set: the MPS daemon of {} is used, none is started\n",
               given);
    return nullptr;
  }
  return options.hosts.empty() ? std::make_unique<MpsDaemon>() : nullptr;
}

}  // namespace

std::vector<NodeShape> planned_nodes(const LaunchOptions& options) {
  std::vector<NodeShape> nodes;
  int shared = options.share_gpu ? options.devices_per_node : 0;
  if (options.share_gpu && shared == 0) shared = static_cast<int>(visible_devices(own_environment()).size());
  for (const HostSlots& host : options.hosts) {
    nodes.push_back({.host = host.host,
                     .processes = host.slots > 0 ? host.slots : options.processes,
                     .devices_per_process = options.devices_per_process,
                     .shared_devices = shared});
  }
  if (nodes.empty()) {
    nodes.assign(static_cast<std::size_t>(options.nodes.max), {.host = {},
                                                               .processes = options.processes,
                                                               .devices_per_process = options.devices_per_process,
                                                               .shared_devices = shared});
  }
  return nodes;
}

int launch(const LaunchOptions& options) {
  check(options);
  const std::unique_ptr<MpsDaemon> daemon = make_daemon(options);
  return run_supervised([&](UniqueFd control) { return run_agent(options, std::move(control)); }, daemon.get());
}

int serve_as_agent(const std::string& coordinator, int node_rank, bool share_gpu) {
  const MasterAddress place = parse_master(coordinator);
  std::string line;
  char byte = 0;
  while (line.size() < 128 && ::read(STDIN_FILENO, &byte, 1) == 1 && byte != '\n') line.push_back(byte);
  const auto secret = parse_secret(line);
  if (!secret) {
    fmt::print(stderr,
               "maniple: run-agent is started by `maniple run --hosts`, which passes the secret on its input\n");
    return kUsage;
  }
  LaunchOptions own;
  own.share_gpu = share_gpu;
  const std::unique_ptr<MpsDaemon> daemon = make_daemon(own);
  return run_supervised(
      [&](UniqueFd control) { return run_started_member(place, node_rank, std::move(control), *secret); },
      daemon.get());
}

}  // namespace maniple::launch
