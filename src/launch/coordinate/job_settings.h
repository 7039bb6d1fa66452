// Derives a node's settings from the options of `maniple run`, and encodes them for other hosts.
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

/// Encodes the settings for agents on other hosts: command, folder, environment, logs. Does not include the secret.
std::vector<std::string> encode_settings(const LaunchOptions& options, Console& console);
/// The inverse, on the other host. Throws ProtocolError.
LaunchOptions decode_settings(const std::vector<std::string>& settings);

}  // namespace maniple::launch
