// What the ranks of a pipeline tell each other before a step: all go through it in the same way, or all get the same
// error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace maniple {

/// What one rank says of a call before it begins.
struct PipelineProposal {
  std::string call, error;
  std::int64_t input_rows = -1, target_rows = -1;
  std::string state;  ///< whatever shapes depend on

  std::string text() const;  ///< a line each, the rest is `state`
  static PipelineProposal parse(const std::string& text);
};

/// Of which modules are in training, what requires a gradient, and autocast: a digest.
std::string settings_of(const std::vector<torch::nn::AnyModule>& stages);

/// How many rows each micro-batch has: as torch::chunk cuts them. No rows are one micro-batch of none.
std::vector<std::int64_t> micro_batch_rows(std::int64_t rows, std::int64_t micro_batches);
std::vector<torch::Tensor> cut_rows(const torch::Tensor& batch, const std::vector<std::int64_t>& rows);

}  // namespace maniple
