// What the functions that take parameters ask about their layout: see maniple/train/tensor_layout.h.
#pragma once

#include <string>
#include <vector>

#include <maniple/train/tensor_layout.h>

namespace maniple::detail {

/// Each tensor object once, in order: a module lists a tied weight under each of its names. Undefined tensors stay.
std::vector<torch::Tensor> distinct(const std::vector<torch::Tensor>& tensors);

/// How many ranks two groups have in common.
int shared_ranks(const ProcessGroup& a, const ProcessGroup& b);

/// Throws InvalidArgument unless all ranks of the group hold the same elements of the parameter, outside of fully_shard.
void require_replicated_over(const ProcessGroup& group, const std::string& name, const torch::Tensor& parameter,
                             const char* function, const char* remedy);

/// Throws InvalidArgument if this rank holds a part of a parameter, or some parameters of a pipeline.
void require_whole(const torch::nn::Module& module, const char* function, const char* remedy);

}  // namespace maniple::detail
