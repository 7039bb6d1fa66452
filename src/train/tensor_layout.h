// Queries about the layout of parameters, for functions that take parameters: see maniple/train/tensor_layout.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <maniple/train/tensor_layout.h>

namespace maniple::detail {

/// Each tensor object once, in order: a module lists a tied weight under each of its names. Keeps undefined tensors.
std::vector<torch::Tensor> distinct(const std::vector<torch::Tensor>& tensors);

/// The number of ranks that two groups have in common.
int shared_ranks(const ProcessGroup& a, const ProcessGroup& b);
bool same_ranks(const ProcessGroup& a, const ProcessGroup& b);

/// The groups that divide any of the parameters, innermost first, so that all ranks of a group reach it in the same
/// order. `given` (may be null) is added; it replaces a group with the same ranks.
std::vector<std::shared_ptr<ProcessGroup>> dividing_groups(const std::vector<torch::Tensor>& parameters,
                                                           const std::shared_ptr<ProcessGroup>& given);

/// Throws InvalidArgument unless all ranks of the group hold the same elements of the parameter, not counting the
/// division by fully_shard.
void require_replicated_over(const ProcessGroup& group, const std::string& name, const torch::Tensor& parameter,
                             const char* function, const char* remedy);

/// Throws InvalidArgument if this rank holds only a part of a parameter, or only some parameters of a pipeline.
void require_whole(const std::string& name, const torch::Tensor& parameter, const char* function, const char* remedy);
void require_whole(const torch::nn::Module& module, const char* function, const char* remedy);

}  // namespace maniple::detail
