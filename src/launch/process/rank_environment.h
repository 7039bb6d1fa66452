// Builds a rank's environment, for the launcher and for spawn. Pure: the starting process's environment is an argument.
//
// The variables have PyTorch's names, so that existing scripts run unchanged.
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
  int first_device = 0;  ///< index among the node's devices
  int device_count = 0;
  friend bool operator==(const WorkerAssignment&, const WorkerAssignment&) = default;
};

/// The values that all workers of a node share in one generation of the group.
struct NodeEnvironment {
  std::string master_addr = {};
  int master_port = 0;
  int node_count = 1;
  std::string job = {};  ///< the job's name, also TORCHELASTIC_RUN_ID; empty for spawn
  int generation = 0;    ///< of the group: counts restarts and membership changes
  int restarts = 0;      ///< restarts of the group after a failure so far
  int max_restarts = 0;
  int secret_fd = -1;       ///< -1: the job has no secret
  int init_fd = -1;         ///< see worker_messages.h; -1: none
  int report_fd = -1;       ///< see worker_messages.h; -1: none
  int members_fd = -1;      ///< see membership_page.h; -1: the job is not elastic
  bool joins_late = false;  ///< this worker replaces another one while the job runs
  int cores = 1;            ///< cores of this node, for OMP_NUM_THREADS
  /// Names of the devices to assign ("0", "1", or the entries of CUDA_VISIBLE_DEVICES). If empty, the assignment's
  /// device numbers are used.
  std::vector<std::string> devices = {};
  int gpu_queues = 0;  ///< CUDA_DEVICE_MAX_CONNECTIONS of each rank, unless it is set already; 0: leave it unset
};

using Environment = std::vector<std::string>;  ///< "NAME=VALUE"

/// The environment of this process.
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
