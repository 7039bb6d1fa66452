// Batch norm in training, over the ranks of a group, with its backward; and which modules have it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>

namespace maniple {

struct BatchNormTensors {
  torch::Tensor weight, bias, running_mean, running_var;  ///< each may be undefined
};

/// Collective. Running statistics move by `momentum` towards those of this batch.
torch::Tensor sync_batch_norm(const torch::Tensor& input, const BatchNormTensors& own, double momentum, double eps,
                              const std::shared_ptr<ProcessGroup>& group);

/// LibTorch's own.
torch::Tensor plain_batch_norm(const torch::Tensor& input, const BatchNormTensors& own, bool training, double momentum,
                               double eps);

/// Names of the SyncBatchNorm modules and the converted ones; "the module itself" for the root.
std::vector<std::string> synchronised_in(const torch::nn::Module& module);

}  // namespace maniple
