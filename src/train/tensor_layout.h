// What the functions that take parameters ask about their layout: see maniple/train/tensor_layout.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <maniple/train/tensor_layout.h>

namespace maniple::detail {

/// Each tensor object once, in order: a module lists a tied weight under each of its names. Undefined tensors stay.
std::vector<torch::Tensor> distinct(const std::vector<torch::Tensor>& tensors);

/// How many ranks two groups have in common.
int shared_ranks(const ProcessGroup& a, const ProcessGroup& b);
bool same_ranks(const ProcessGroup& a, const ProcessGroup& b);

/// The groups that divide any of the parameters, innermost first: all ranks of a group reach it in the same order.
/// `given` (may be null) is one more; it replaces a group of the same ranks.
std::vector<std::shared_ptr<ProcessGroup>> dividing_groups(const std::vector<torch::Tensor>& parameters,
                                                           const std::shared_ptr<ProcessGroup>& given);

/// Throws InvalidArgument unless all ranks of the group hold the same elements of the parameter, outside of
/// fully_shard.
void require_replicated_over(const ProcessGroup& group, const std::string& name, const torch::Tensor& parameter,
                             const char* function, const char* remedy);

/// Throws InvalidArgument if this rank holds a part of a parameter, or some parameters of a pipeline.
void require_whole(const std::string& name, const torch::Tensor& parameter, const char* function, const char* remedy);
void require_whole(const torch::nn::Module& module, const char* function, const char* remedy);

}  // namespace maniple::detail
