// The validated options of `maniple run`, independent of any command-line library.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/coordinate/policies.h"
#include "launch/option_values.h"
#include "launch/output/console.h"
#include "launch/placement/rank_plan.h"
#include "launch/workers/worker_group.h"

namespace maniple::launch {

/// Each option has one field. What a part of the launcher needs is a base: its options are never copied one by one.
struct LaunchOptions : CoordinatorOptions, WorkerOptions {
  std::vector<Assignment> environment;  ///< --env

  int processes = 1;            ///< on this node
  int devices_per_process = 0;  ///< 0: devices are not assigned

  int node_rank = -1;  ///< -1: by arrival
  std::optional<MasterAddress> master;
  std::string secret_file;
  Heartbeat heartbeat;  ///< the coordinator's applies to all nodes

  std::vector<HostSlots> hosts;  ///< not empty: this launcher starts agents there
  std::string rsh = "ssh";
  std::string remote_maniple;  ///< empty: the path of this program

  ConsoleOptions console;
  friend bool operator==(const LaunchOptions&, const LaunchOptions&) = default;
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
