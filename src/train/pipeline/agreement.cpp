#include "train/pipeline/agreement.h"

#include <algorithm>
#include <sstream>

#include "comm/base/format.h"
#include "train/tensor/torch_compat.h"

namespace maniple {

std::string PipelineProposal::text() const {
  return format_text("{}\n{}\n{}\n{}\n{}", call, one_line(error), input_rows, target_rows, state);
}

PipelineProposal PipelineProposal::parse(const std::string& text) {
  PipelineProposal result;
  std::istringstream lines(text);
  std::string number;
  std::getline(lines, result.call);
  std::getline(lines, result.error);
  std::getline(lines, number);
  result.input_rows = std::stoll(number);
  std::getline(lines, number);
  result.target_rows = std::stoll(number);
  std::getline(lines, result.state, '\0');
  return result;
}

std::string settings_of(const std::vector<torch::nn::AnyModule>& stages) {
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
  for (const torch::nn::AnyModule& stage : stages) {
    for (const auto& module : stage.ptr()->modules()) add(module->is_training() ? 1 : 2);
    for (const torch::Tensor& parameter : stage.ptr()->parameters()) {
      if (!parameter.defined()) continue;
      add(2 * static_cast<std::uint64_t>(parameter.scalar_type()) + (parameter.requires_grad() ? 1 : 0));
    }
  }
  for (const auto device : {torch::kCPU, torch::kCUDA}) {
    add(autocast_enabled(device) ? 3 + static_cast<std::uint64_t>(autocast_dtype(device)) : 0);
  }
  return format_text("{:x}", hash);
}

std::vector<std::int64_t> micro_batch_rows(std::int64_t rows, std::int64_t micro_batches) {
  const std::int64_t size = std::max<std::int64_t>(1, (rows + micro_batches - 1) / micro_batches);
  std::vector<std::int64_t> result;
  for (std::int64_t begin = 0; begin < rows || result.empty(); begin += size) {
    result.push_back(std::min(size, rows - begin));
  }
  return result;
}

std::vector<torch::Tensor> cut_rows(const torch::Tensor& batch, const std::vector<std::int64_t>& rows) {
  std::vector<torch::Tensor> parts;
  std::int64_t begin = 0;
  for (const std::int64_t count : rows) {
    parts.push_back(batch.narrow(0, begin, count));
    begin += count;
  }
  return parts;
}

}  // namespace maniple
