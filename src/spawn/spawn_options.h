// What spawn refuses before it starts anything, and what it works out from its options.
#pragma once

#include <cstdint>
#include <utility>

#include "base/unique_fd.h"
#include "spawn/child_environment.h"
#include <maniple/launch/spawn.h>

namespace maniple::launch {

void check_spawn_options(const SpawnOptions& options);

/// Throws Unsupported when this process has threads: fork would copy their locks but not them.
void check_fork_is_safe();

/// The address, a port that stays reserved as long as `reservation` is open, and the secret of the job.
struct SpawnRendezvous {
  MasterEndpoint point;
  UniqueFd reservation;
  UniqueFd secret;
};
SpawnRendezvous prepare_rendezvous(const SpawnOptions& options);

/// For OMP_NUM_THREADS: cores of this process / nprocs; 0 when the variable is set already.
int threads_for_each(int nprocs);

}  // namespace maniple::launch
