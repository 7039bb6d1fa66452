// The two kinds of agent: one coordinates the job, the others are its members.
#pragma once

#include "comm/base/unique_fd.h"
#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include "launch/launch_options.h"

namespace maniple::launch {

/// The whole job on this node, or the coordinator of several. `listener` is where other launchers connect; none: only
/// this node, and rank 0 listens at `master` (port 0: any). The result is the exit code.
int run_coordinator(const LaunchOptions& options, UniqueFd control, UniqueFd listener, const Address& master,
                    const Secret& secret);

/// A node that connects to the coordinator at `options.master`.
int run_member(const LaunchOptions& options, UniqueFd control, const Secret& secret);

/// A node that was started by the coordinator, which sends it what to run.
int run_started_member(const MasterAddress& coordinator, int node_rank, UniqueFd control, const Secret& secret);

}  // namespace maniple::launch
