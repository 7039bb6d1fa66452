// Small modules and the whole-batch reference that data-parallel gradients are compared with.
#pragma once

#include <map>
#include <string>

#include <torch/torch.h>

namespace maniple::testing_models {

/// Two layers, with batch norm if asked for.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width = 16, bool batch_norm = false)
      : fc1(register_module("fc1", torch::nn::Linear(8, width))),
        fc2(register_module("fc2", torch::nn::Linear(width, 4))) {
    if (batch_norm) norm = register_module("norm", torch::nn::BatchNorm1d(width));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = fc1->forward(x);
    if (norm) x = norm->forward(x);
    return fc2->forward(torch::tanh(x));
  }
  torch::nn::Linear fc1, fc2;
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

using Gradients = std::map<std::string, torch::Tensor>;

inline Gradients gradients_of(const torch::nn::Module& module) {
  Gradients result;
  for (const auto& item : module.named_parameters()) {
    result[item.key()] = item.value().grad().defined() ? item.value().grad().detach().clone() : torch::Tensor();
  }
  return result;
}

/// The rows of a batch that are rank r's of n, equally many for each.
inline torch::Tensor shard(const torch::Tensor& batch, int rank, int n) {
  const std::int64_t rows = batch.size(0) / n;
  return batch.narrow(0, rank * rows, rows);
}

/// A batch that is the same wherever it is made: nobody's generator is touched.
inline torch::Tensor numbers(torch::IntArrayRef sizes, int seed = 1) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return torch::sin(torch::arange(count, torch::kFloat64) * 1.7 + seed).view(sizes).to(torch::kFloat32);
}

/// Parameters that depend on `seed` alone.
inline void fill(torch::nn::Module& module, int seed) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.copy_(numbers(parameter.sizes(), seed++) * 0.3);
}

/// A mean over the rows, so that the mean over equal shards is the mean over all.
inline torch::Tensor loss_of(const torch::Tensor& output) { return output.pow(2).sum(1).mean(); }

}  // namespace maniple::testing_models
