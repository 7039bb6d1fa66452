// Jobs whose members change while they run (`maniple run --elastic`; docs/elastic.md).
//
// The launcher forms a *generation* from the workers that live and wait to join. A worker's world belongs to one
// generation; when a member dies, leaves, or a new one is ready, all members make the world of the next.
//
// A worker that replaces a lost one gets a *detached* world from init(): it has a rank and a size, but all operations
// throw. The program joins the others with next_generation().
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// Whether the launcher may change the members of this process's job.
bool is_elastic();
/// Whether the group is the world of a worker that has not joined the job yet.
bool is_detached(const ProcessGroup& group);
/// Whether the launcher has formed a generation after this worker's. Takes no system call.
bool has_next_generation();
/// Whether the launcher ends all workers, so that SIGTERM does not mean that this one leaves.
bool launcher_ends();
/// Tells the launcher that this worker leaves: the next generation is formed without it.
void announce_leaving();

/// Makes `world`, whose operations then fail on all ranks, useless; waits for the next generation that this worker
/// belongs to, and returns its world, with the options of `world`. `lost`: ranks of `world` that do not respond; the
/// launcher ends them. `reason` is in the errors of the other ranks.
std::shared_ptr<ProcessGroup> next_generation(const std::shared_ptr<ProcessGroup>& world, const std::vector<int>& lost,
                                              const std::string& reason);

namespace detail {
/// init() in an elastic job.
std::shared_ptr<ProcessGroup> init_elastic(const InitOptions& options, Deadline deadline);
}  // namespace detail

}  // namespace maniple
