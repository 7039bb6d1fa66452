// Concatenates the results of the replicas, and in backward distributes the gradients to the replicas.
//
// Each replica has its own graph. It leads from leaves, which stand for the replica's part of the arguments and for its
// parameters, to the replica's results. The gathered results are connected to a single node of the program's graph,
// *not* to those graphs: autograd runs the CPU part of a graph in the one thread that called backward, so it would run
// the replicas' graphs one after another. Instead, the node lets each replica's thread run that replica's graph. It
// then adds up the gradients and passes them on to the module's parameters and the arguments.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/torch.h>

#include "train/data_parallel/replica_threads.h"

namespace maniple {

using Tensors = std::vector<torch::Tensor>;

/// The graph that a replica's forward left behind.
struct ReplicaGraph {
  Tensors outputs;
  Tensors inputs;                   ///< leaves, for arguments that require a gradient
  std::vector<Tensors> parameters;  ///< leaves, for each of the module's parameters that requires a gradient
};

/// The tensors that receive gradients.
struct GatherTargets {
  Tensors inputs;      ///< the arguments that require a gradient
  Tensors parameters;  ///< the module's parameters that require a gradient
};

struct GatherOptions {
  std::int64_t dim;
  torch::Device device;
};

/// Concatenates the results of two or more replicas. With `targets`, results that require a gradient are connected to
/// them.
Tensors gather(const std::shared_ptr<ReplicaThreads>& threads, std::vector<ReplicaGraph> graphs,
               const GatherOptions& options, const GatherTargets& targets);

}  // namespace maniple
