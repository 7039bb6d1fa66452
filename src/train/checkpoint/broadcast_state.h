// Copies the state of a checkpoint part from one rank to the others, in memory.
#pragma once

#include <string>

#include "train/checkpoint/named_state.h"
#include <maniple/comm/process_group.h>

namespace maniple {

/// Names, types and shapes of the tensors, and the texts. Throws InvalidArgument if a tensor cannot be copied.
std::string description_of(const NamedState& state);

/// On other ranks than `source`, `state` becomes the state of `source`, on the CPU. `description` counts on `source`
/// only, as description_of() returned it. Collective.
void broadcast_state(NamedState& state, const std::string& description, int source, ProcessGroup& ranks);

}  // namespace maniple
