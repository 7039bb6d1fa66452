// A parameter that requires a gradient, and what DistributedDataParallel knows of it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensor/torch_compat.h"
#include "train/ddp/module_tensors.h"
#include <maniple/train/ddp.h>

namespace maniple {

struct Parameter {
  explicit Parameter(NamedTensor named)
      : name(std::move(named.name)), tensor(std::move(named.tensor)), dtype(tensor.scalar_type()) {}

  std::string name;
  torch::Tensor tensor;
  torch::ScalarType dtype;                             ///< at construction
  std::optional<GradientHook> hook;                    ///< calls the reducer when autograd has computed the gradient
  std::shared_ptr<torch::optim::Optimizer> optimizer;  ///< applied in backward; null: by the program

  std::size_t bucket = 0;  ///< its bucket, once buckets are laid out
  std::size_t place = 0;   ///< its index in the bucket
  bool delayed = false;    ///< see delayed_gradients.h

  bool expected = true;      ///< static_graph: got a gradient in the first backward
  bool used = true;          ///< find_unused_parameters, static_graph: got a gradient on any rank
  bool accumulated = false;  ///< got a gradient under no_sync since the last synchronised backward

  // Of the backward under way.
  bool ready = false;   ///< its gradient is computed
  bool early = false;   ///< delayed, and ready before the backward's first other gradient
  torch::Tensor saved;  ///< its gradient as it was, if this rank has computed none

  /// What is wrong and what to do, if it was converted to another dtype or device; otherwise empty.
  std::string conversion() const;
};

/// The optimizer of one parameter, from the program's factory. Throws InvalidArgument for one that cannot step alone.
std::shared_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerFactory& make, const Parameter& parameter);

/// Sets `used` of each parameter that has a gradient on any rank. Collective: one all_reduce of a byte for each.
void exchange_used(ProcessGroup& group, std::span<Parameter> parameters, const std::vector<bool>& used_here);

/// "fc2.weight, fc2.bias and 3 more".
std::string names_of(const std::vector<const Parameter*>& parameters);

}  // namespace maniple
