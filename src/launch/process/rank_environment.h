// The environment of a rank, for the launcher and for spawn. Pure: the environment of the starting process is an
// argument.
//
// The names are those of PyTorch, so that existing scripts run unchanged.
#pragma once

#include <string>
#include <vector>

namespace maniple::launch {

/// One process of the job.
struct WorkerAssignment {
  int rank = 0;
  int node_rank = 0;
  int local_rank = 0;
  int local_size = 1;
  int world_size = 1;
  int first_device = 0;  ///< index among the devices of the node
  int device_count = 0;
  friend bool operator==(const WorkerAssignment&, const WorkerAssignment&) = default;
};

/// What all workers of a node share in one generation of the group.
struct NodeEnvironment {
  std::string master_addr = {};
  int master_port = 0;
  int node_count = 1;
  std::string job = {};  ///< names the job; also TORCHELASTIC_RUN_ID. Empty: spawn, which has none
  int generation = 0;    ///< of the group: restarts and changes of membership
  int restarts = 0;      ///< how often the group has been started again so far
  int max_restarts = 0;
  int secret_fd = -1;  ///< -1: the job has no secret
  int init_fd = -1;    ///< see worker_messages.h; -1: none
  int report_fd = -1;  ///< see worker_messages.h; -1: none
  int cores = 1;       ///< of this node, for OMP_NUM_THREADS
  /// Names of the devices that may be shared out ("0", "1", or what CUDA_VISIBLE_DEVICES held); empty: there are none,
  /// and the numbers of the assignment are used if devices are shared out all the same.
  std::vector<std::string> devices = {};
  int gpu_queues = 0;  ///< of a rank, to its GPU: CUDA_DEVICE_MAX_CONNECTIONS, unless it is set; 0: left alone
};

using Environment = std::vector<std::string>;  ///< "NAME=VALUE"

/// That of this process.
Environment own_environment();

/// Replaces or adds a variable.
void set_variable(Environment& environment, const std::string& name, const std::string& value);
void unset_variable(Environment& environment, const std::string& name);
const std::string* find_variable(const Environment& environment, const std::string& name);

Environment rank_environment(const Environment& own, const NodeEnvironment& node, const WorkerAssignment& assignment);

/// The GPUs of this host that a job may use: the entries of CUDA_VISIBLE_DEVICES if it is set, else one for each
/// /dev/nvidiaN.
std::vector<std::string> visible_devices(const Environment& own);

}  // namespace maniple::launch
