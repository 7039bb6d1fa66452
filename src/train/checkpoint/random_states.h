// The state of random generators in checkpoints: tensors rank.0, rank.1, ... of the CPU's, rank.0.cuda, ... of the
// GPUs' that a rank sees, one after the other.
#pragma once

#include "train/checkpoint/named_state.h"
#include "train/checkpoint/part.h"

namespace maniple {

/// Of all ranks, on rank 0. Collective; null: this process alone.
NamedState random_states(ProcessGroup* ranks);

/// Of this rank alone, for a sharded checkpoint.
PartState own_random_state(int rank);

/// As far as this rank was there, and sees as many GPUs as it did.
void set_random_states(const SavedPart& saved, int rank);

}  // namespace maniple
