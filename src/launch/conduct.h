// The two kinds of agent: one conducts the job, the others follow.
#pragma once

#include "base/unique_fd.h"
#include "launch/launch_options.h"
#include "net/address.h"
#include "net/handshake.h"

namespace maniple::launch {

/// The whole job on this node, or the conductor of several. `listener` is where other launchers come; none: only this
/// node, and rank 0 listens at `master` (port 0: any). The result is the exit code.
int conduct(const LaunchOptions& options, UniqueFd control, UniqueFd listener, const Address& master,
            const Secret& secret);

/// A node that connects to the conductor at `options.master`.
int follow(const LaunchOptions& options, UniqueFd control, const Secret& secret);

/// A node that was started by the conductor, which tells it what to run.
int follow_as_agent(const MasterPlace& conductor, int node_rank, UniqueFd control, const Secret& secret);

}  // namespace maniple::launch
