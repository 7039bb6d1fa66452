// The validated options of `maniple run`, independent of any command-line library.
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
  int devices_per_process = 0;  ///< 0: devices are not assigned
  int devices_per_node = 0;     ///< 0: all devices the node sees
  bool share_gpu = false;       ///< several ranks on one GPU, through MPS (see workers/mps_daemon.h)

  NodeRange nodes;
  int node_rank = -1;  ///< -1: by arrival
  std::optional<MasterAddress> master;
  std::string secret_file;
  std::chrono::duration<double> join_timeout{300.0};
  std::chrono::duration<double> join_window{5.0};
  Heartbeat heartbeat;  ///< the coordinator's applies to all nodes

  std::vector<HostSlots> hosts;  ///< not empty: this launcher starts agents there
  std::string rsh = "ssh";
  std::string remote_maniple;  ///< empty: the path of this program

  BindPolicy bind = BindPolicy::automatic;
  int cores_per_process = 0;  ///< 0: all cores are divided among the ranks
  bool verbose = false;
  bool terminal_output = true;  ///< workers' standard output is a pseudo-terminal, see StartOutput
  std::string log_folder;
  std::vector<int> only_ranks;
  ConsoleOptions console;

  RestartPolicy restarts;
  std::chrono::duration<double> grace{0.8};
  std::chrono::duration<double> interrupt_grace{30.0};
};

/// The node shapes as far as they are known before the job starts, for --explain.
std::vector<NodeShape> planned_nodes(const LaunchOptions& options);

/// Runs the job and returns the exit code of `maniple run`. Throws InvalidArgument (ProgramError with its own code)
/// before anything is started.
int launch(const LaunchOptions& options);

/// The agent that the coordinator of --hosts starts on another host: reads the secret from standard input, connects to
/// `coordinator` ("address:port") and carries out its messages. With `share_gpu` it starts an MPS daemon first.
int serve_as_agent(const std::string& coordinator, int node_rank, bool share_gpu);

}  // namespace maniple::launch
