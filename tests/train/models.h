// Small modules and the whole-batch reference that data-parallel gradients are compared with.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "harness/device_memory.h"

namespace maniple::testing_models {

/// Where the tests train: MANIPLE_TEST_DEVICE=cuda runs them on a GPU (see harness/device_memory.h).
inline torch::Device training_device() {
  return harness::test_device().is_cpu() ? torch::Device(torch::kCPU) : torch::Device(torch::kCUDA, 0);
}

/// Two layers, with batch norm if asked for, where the tests train.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width = 16, bool batch_norm = false)
      : fc1(register_module("fc1", torch::nn::Linear(8, width))),
        fc2(register_module("fc2", torch::nn::Linear(width, 4))) {
    if (batch_norm) norm = register_module("norm", torch::nn::BatchNorm1d(width));
    to(training_device());
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

/// The rows of a batch that are rank r's of n, the same number for each.
inline torch::Tensor shard(const torch::Tensor& batch, int rank, int n) {
  const std::int64_t rows = batch.size(0) / n;
  return batch.narrow(0, rank * rows, rows);
}

/// A batch that is the same wherever it is made; it does not use the global generator.
inline torch::Tensor numbers(torch::IntArrayRef sizes, int seed = 1) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return torch::sin(torch::arange(count, torch::kFloat64) * 1.7 + seed)
      .view(sizes)
      .to(torch::kFloat32)
      .to(training_device());
}

/// Parameters that depend on `seed` alone; the module is where the tests train afterwards.
inline void fill(torch::nn::Module& module, int seed) {
  const torch::NoGradGuard no_grad;
  module.to(training_device());
  for (auto& parameter : module.parameters()) parameter.copy_(numbers(parameter.sizes(), seed++) * 0.3);
}

/// A mean over the rows, so that the mean over equal shards is the mean over all.
inline torch::Tensor loss_of(const torch::Tensor& output) { return output.pow(2).sum(1).mean(); }

/// A module whose gradients the test prescribes: the loss is the sum of parameter times prescribed gradient.
struct PrescribedGradients : torch::nn::Module {
  using Shapes = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;

  explicit PrescribedGradients(const Shapes& shapes, torch::ScalarType dtype = torch::kFloat32) {
    for (const auto& [name, shape] : shapes) {
      torch::Tensor values = torch::zeros(shape, dtype);
      if (shape.size() == 4) values = values.contiguous(torch::MemoryFormat::ChannelsLast);
      register_parameter(name, values.to(training_device()));
    }
  }

  /// After backward() of this the gradient of each parameter is the tensor of its name.
  torch::Tensor loss(const Gradients& expected) {
    torch::Tensor sum = torch::zeros({}, training_device());
    for (const auto& item : named_parameters()) {
      sum = sum + (item.value() * expected.at(item.key()).to(item.value().device(), item.value().scalar_type()))
                      .sum()
                      .to(torch::kFloat32);
    }
    return sum;
  }
};

/// A rank's gradients in a step: full rank, different for all.
inline Gradients gradients_in(const PrescribedGradients::Shapes& shapes, int rank, int step) {
  Gradients result;
  int seed = 1000 * rank + 10 * step;
  for (const auto& [name, shape] : shapes) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    const torch::Tensor at = torch::arange(count, torch::kFloat64);
    result[name] = (torch::sin(at * at * 0.37 + ++seed) + 0.5 * torch::cos(at * 1.3)).view(shape);
  }
  return result;
}

inline Gradients mean_of(const std::vector<Gradients>& all) {
  Gradients result;
  for (const auto& [name, first] : all.front()) {
    result[name] = torch::zeros_like(first);
    for (const Gradients& one : all) result[name] += one.at(name) / static_cast<double>(all.size());
  }
  return result;
}

/// Passes a tensor on unchanged; its backward throws if `fails`, as the program's own code might.
struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x, bool fails) {
    context->saved_data["fails"] = fails;
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    if (context->saved_data["fails"].toBool()) throw std::runtime_error("failed on purpose");
    return {gradients[0], torch::Tensor()};
  }
};

}  // namespace maniple::testing_models
