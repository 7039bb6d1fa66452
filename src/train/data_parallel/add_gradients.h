// The sum of the replicas' gradients.
#pragma once

#include <vector>

#include <torch/torch.h>

#include "train/data_parallel/replica_threads.h"

namespace maniple {

/// For each parameter the sum of its addends, from the first to the last, on the parameter's device; undefined where there
/// are none. Large ones are added by all replicas' threads, each a slice.
std::vector<torch::Tensor> add_gradients(ReplicaThreads& threads, std::vector<std::vector<torch::Tensor>> addends,
                                         const std::vector<torch::Tensor>& parameters);

}  // namespace maniple
