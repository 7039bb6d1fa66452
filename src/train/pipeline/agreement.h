// The exchange before a step of a pipeline, which makes all ranks take the step in the same way, or all throw the same
// error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace maniple {

/// What one rank reports of a call before the call begins.
struct PipelineProposal {
  std::string call, error;
  std::int64_t input_rows = -1, target_rows = -1;
  std::string state;  ///< everything that shapes depend on

  std::string text() const;  ///< one line per field; the rest is `state`
  static PipelineProposal parse(const std::string& text);
};

/// A digest of the settings that shapes depend on: training modes, which parameters require a gradient, autocast.
std::string settings_of(const std::vector<torch::nn::AnyModule>& stages);

/// The number of rows in each micro-batch, cut as torch::chunk does. A batch without rows gives one empty micro-batch.
std::vector<std::int64_t> micro_batch_rows(std::int64_t rows, std::int64_t micro_batches);
std::vector<torch::Tensor> cut_rows(const torch::Tensor& batch, const std::vector<std::int64_t>& rows);

}  // namespace maniple
