// Derives a node's settings from the options of `maniple run`, and the options for nodes on other hosts.
#pragma once

#include <string>
#include <vector>

#include "launch/launch_options.h"
#include "launch/workers/worker_group.h"

namespace maniple::launch {

std::string own_host_name();
std::string new_job_name();  ///< "run-1f3a9c44"
WorkerGroupSettings worker_group_settings(const LaunchOptions& options);
/// CUDA_MPS_PIPE_DIRECTORY from --env, or else from this process's environment: the folder of an MPS daemon that is
/// already running. Empty: none. With --hosts only --env counts, because no other variable is sent to other hosts.
std::string given_mps_folder(const LaunchOptions& options);

/// The options for agents on other hosts. What depends on this host (folder, variables, colours) is decided here. Does
/// not include the secret.
LaunchOptions options_for_agents(const LaunchOptions& options, const Console& console);

}  // namespace maniple::launch
