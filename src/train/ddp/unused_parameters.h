// Parameters that got no gradient in a backward.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "train/ddp/module_tensors.h"
#include <maniple/comm/process_group.h>

namespace maniple {

/// Which parameters got a gradient on any rank, from which got one here. Collective: one all_reduce of a byte for each.
std::vector<bool> used_anywhere(ProcessGroup& group, const std::vector<bool>& used_here);

/// "fc2.weight, fc2.bias and 3 more".
std::string names_of(std::span<const std::size_t> parameters, std::span<const NamedTensor> all);

}  // namespace maniple
