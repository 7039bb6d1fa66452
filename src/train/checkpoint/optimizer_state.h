// An optimizer as tensors and numbers, and back: options of every parameter group, state of every parameter.
//
// A new kind of optimizer is one visitor for its options, one for its state, and one line in the table of optimizer_state.cpp.
#pragma once

#include "train/checkpoint/named_state.h"

namespace maniple {

/// Throws Unsupported for a kind that is not in the table, naming those that are.
NamedState state_of(torch::optim::Optimizer& optimizer);

/// Throws InvalidArgument naming what does not fit: another kind, other groups, other parameters.
void restore(torch::optim::Optimizer& optimizer, const NamedState& state);

}  // namespace maniple
