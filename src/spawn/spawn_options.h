// What spawn refuses before it starts anything, and what it derives from its options.
#pragma once

#include "base/unique_fd.h"
#include "process/rank_environment.h"
#include <maniple/launch/spawn.h>

namespace maniple::launch {

void check_spawn_options(const SpawnOptions& options);

/// Throws Unsupported when this process has threads: fork would copy their locks but not them.
void check_fork_is_safe();

/// The address of rank 0, a port that stays reserved as long as `reservation` is open, and the secret of the job.
struct SpawnRendezvous {
  NodeEnvironment node;
  UniqueFd reservation;
  UniqueFd secret;
};
SpawnRendezvous prepare_rendezvous(const SpawnOptions& options);

/// The place of process `index` in the job. Pure.
WorkerAssignment assignment_of(const SpawnOptions& options, int index);

}  // namespace maniple::launch
