// The options of `maniple run`, checked and without any command-line library in it.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launch/coordinate/policies.h"
#include "launch/option_values.h"
#include "launch/output/console.h"
#include "launch/placement/binding.h"
#include "launch/placement/rank_plan.h"

namespace maniple::launch {

struct LaunchOptions {
  std::vector<std::string> command;
  std::string folder;                   ///< where workers start; empty: here
  std::vector<Assignment> environment;  ///< --env

  int processes = 1;            ///< on this node
  int devices_per_process = 0;  ///< 0: devices are not shared out
  int devices_per_node = 0;     ///< 0: those that a node sees
  bool share_gpu = false;       ///< several ranks on one GPU, by MPS (see workers/mps_daemon.h)

  NodeRange nodes;
  int node_rank = -1;  ///< -1: by arrival
  std::optional<MasterAddress> master;
  std::string secret_file;
  std::chrono::duration<double> join_timeout{300.0};
  std::chrono::duration<double> join_window{5.0};
  Heartbeat heartbeat;  ///< that of the coordinator counts for all nodes

  std::vector<HostSlots> hosts;  ///< not empty: agents are started there
  std::string rsh = "ssh";
  std::string remote_maniple;  ///< empty: the path of this program

  BindPolicy bind = BindPolicy::automatic;
  int cores_per_process = 0;  ///< 0: all cores are shared out
  bool verbose = false;
  bool terminal_output = true;  ///< the standard output of workers is a pseudo-terminal, see StartOutput
  std::string log_folder;
  std::vector<int> only_ranks;
  ConsoleOptions console;

  RestartPolicy restarts;
  std::chrono::duration<double> grace{0.8};
  std::chrono::duration<double> interrupt_grace{30.0};
};

/// The shapes of all nodes as far as they can be known beforehand: for --explain.
std::vector<NodeShape> planned_nodes(const LaunchOptions& options);

/// Runs the job; the result is the exit code of `maniple run`. Throws InvalidArgument (ProgramError with its own code)
/// before anything is started.
int launch(const LaunchOptions& options);

/// What the coordinator of --hosts starts on another host: reads the secret from standard input, connects to
/// `coordinator` ("address:port") and carries out its messages. `share_gpu`: it starts an MPS daemon first.
int serve_as_agent(const std::string& coordinator, int node_rank, bool share_gpu);

}  // namespace maniple::launch
