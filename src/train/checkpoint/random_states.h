// The state of random generators in checkpoints: tensor rank.N for the CPU generator of rank N, rank.N.cuda for the
// generators of the GPUs that the rank sees, concatenated.
#pragma once

#include "train/checkpoint/named_state.h"
#include "train/checkpoint/part.h"

namespace maniple {

/// The states of all ranks, on rank 0. Collective; `ranks` null: this process alone.
NamedState random_states(ProcessGroup* ranks);

/// The state of this rank alone, for a sharded checkpoint.
PartState own_random_state(int rank);

/// Restores this rank's generators if the checkpoint has their states; GPU generators in order, as far as the saved
/// states reach.
void set_random_states(const SavedPart& saved, int rank);

}  // namespace maniple
