// Which modules have synchronised batch norm in them.
#pragma once

#include <string>
#include <vector>

#include <torch/torch.h>

namespace maniple {

/// Names of the SyncBatchNorm modules and the converted ones; "the module itself" for the root.
std::vector<std::string> synchronised_in(const torch::nn::Module& module);

}  // namespace maniple
