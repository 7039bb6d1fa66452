// The two kinds of agent: the coordinator of a job, and its members.
#pragma once

#include "comm/base/unique_fd.h"
#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include "launch/launch_options.h"

namespace maniple::launch {

/// Runs a job on this node alone, or coordinates the nodes of a larger job. Other launchers connect to `listener`.
/// Without a listener the job has only this node, and rank 0 listens at `master` (port 0: any). Returns the exit code.
int run_coordinator(const LaunchOptions& options, UniqueFd control, UniqueFd listener, const Address& master,
                    const Secret& secret);

/// Runs a node that connects to the coordinator at `options.master`.
int run_member(const LaunchOptions& options, UniqueFd control, const Secret& secret);

/// Runs a node that the coordinator started. The coordinator sends it what to run.
int run_started_member(const MasterAddress& coordinator, int node_rank, UniqueFd control, const Secret& secret);

}  // namespace maniple::launch
