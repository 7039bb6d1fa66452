// From the results of the replicas to one, and in backward the other way round.
//
// Each replica has a graph of its own, from leaves that stand for its part of the arguments and its parameters to its
// results. The gathered results hang on a single node of the program's graph, *not* on those graphs: autograd walks
// what is on the CPU in the one thread that called backward, so it would walk all replicas one after the other. The
// node instead has each replica's thread walk that replica's graph, adds up the gradients, and hands it on to the
// module's parameters and the arguments.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/torch.h>

#include "train/data_parallel/replica_threads.h"

namespace maniple {

using Tensors = std::vector<torch::Tensor>;

/// What a replica's forward left behind.
struct ReplicaGraph {
  Tensors outputs;
  Tensors inputs;                   ///< leaves; those of arguments that require a gradient
  std::vector<Tensors> parameters;  ///< leaves; for each of the module's parameters that require a gradient
};

/// Where gradients go.
struct GatherTargets {
  Tensors inputs;      ///< the arguments that require a gradient
  Tensors parameters;  ///< the module's parameters that do
};

struct GatherOptions {
  std::int64_t dim;
  torch::Device device;
};

/// Concatenates results of two replicas or more. With `targets`, those that require a gradient are connected to them.
Tensors gather(const std::shared_ptr<ReplicaThreads>& threads, std::vector<ReplicaGraph> graphs,
               const GatherOptions& options, const GatherTargets& targets);

}  // namespace maniple
