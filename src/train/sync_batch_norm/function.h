// Batch norm in training over the ranks of a group, with its backward, and a list of the modules that use it.
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

/// Collective. Moves the running statistics by `momentum` towards the statistics of this batch.
torch::Tensor sync_batch_norm(const torch::Tensor& input, const BatchNormTensors& own, double momentum, double eps,
                              const std::shared_ptr<ProcessGroup>& group);

/// LibTorch's own batch norm.
torch::Tensor plain_batch_norm(const torch::Tensor& input, const BatchNormTensors& own, bool training, double momentum,
                               double eps);

/// Names of the SyncBatchNorm modules and the converted modules; "the module itself" for the root.
std::vector<std::string> synchronised_in(const torch::nn::Module& module);

}  // namespace maniple
