// The settings of a node, from the options of `maniple run`: here, and encoded for another host.
#pragma once

#include <string>
#include <vector>

#include "launch/launch_options.h"
#include "launch/workers/worker_group.h"

namespace maniple::launch {

std::string own_host_name();
std::string new_job_name();  ///< "run-1f3a9c44"
WorkerGroupSettings worker_group_settings(const LaunchOptions& options);
/// CUDA_MPS_PIPE_DIRECTORY as --env has it, or else this process's environment: an MPS daemon that runs already. Empty:
/// none. With --hosts only --env counts, as nothing else is sent to other hosts.
std::string given_mps_folder(const LaunchOptions& options);

/// What agents on other hosts are sent: command, folder, environment, logs. The secret is not in it.
std::vector<std::string> encode_settings(const LaunchOptions& options, Console& console);
/// The inverse, on the other host. Throws ProtocolError.
LaunchOptions decode_settings(const std::vector<std::string>& settings);

}  // namespace maniple::launch
