// A module whose gradients are whatever the test wants: the loss is the sum of parameter times wanted gradient.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "train/models.h"

namespace maniple::testing_models {

struct Given : torch::nn::Module {
  using Shapes = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;

  explicit Given(const Shapes& shapes, torch::ScalarType dtype = torch::kFloat32) {
    for (const auto& [name, shape] : shapes) {
      torch::Tensor values = torch::zeros(shape, dtype);
      if (shape.size() == 4) values = values.contiguous(torch::MemoryFormat::ChannelsLast);
      register_parameter(name, values);
    }
  }

  /// After backward() of this the gradient of each parameter is the tensor of its name.
  torch::Tensor loss(const Gradients& wanted) {
    torch::Tensor sum = torch::zeros({});
    for (const auto& item : named_parameters()) {
      sum = sum + (item.value() * wanted.at(item.key()).to(item.value().scalar_type())).sum().to(torch::kFloat32);
    }
    return sum;
  }
};

/// A rank's gradients in a step: full rank, different for all.
inline Gradients gradients_in(const Given::Shapes& shapes, int rank, int step) {
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

}  // namespace maniple::testing_models
