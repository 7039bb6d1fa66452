// From what the user asked for to what a node needs, here and across a connection.
#pragma once

#include <string>
#include <vector>

#include "launch/workers/worker_group.h"
#include "launch/launch_options.h"

namespace maniple::launch {

std::string own_host_name();
std::string new_job_name();  ///< "run-1f3a9c44"
/// The environment of this process.
Environment own_environment();

WorkerGroupSettings worker_group_settings(const LaunchOptions& options);

/// What agents on other hosts are told: command, folder, environment, logs. The secret is not in it.
std::vector<std::string> to_words(const LaunchOptions& options, Console& console);
/// The inverse, on the other host. Throws ProtocolError.
LaunchOptions from_words(const std::vector<std::string>& words);

}  // namespace maniple::launch
