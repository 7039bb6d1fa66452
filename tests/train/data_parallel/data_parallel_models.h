// Modules that DataParallel is tried with.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <torch/torch.h>

#include "train/models.h"

namespace maniple::testing_models {

inline std::vector<torch::Device> cpus(std::size_t count) { return std::vector<torch::Device>(count, torch::kCPU); }

/// Two layers; batch norm if asked for. Cloneable.
struct TwinImpl : torch::nn::Cloneable<TwinImpl> {
  explicit TwinImpl(bool with_norm = false) : batch_norm(with_norm) { reset(); }
  void reset() override {
    fc1 = register_module("fc1", torch::nn::Linear(8, 16));
    fc2 = register_module("fc2", torch::nn::Linear(16, 4));
    if (batch_norm) norm = register_module("norm", torch::nn::BatchNorm1d(16));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = fc1->forward(x);
    if (norm) x = norm->forward(x);
    return fc2->forward(torch::tanh(x));
  }
  bool batch_norm;
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Twin);

/// The test supplies its forward; replicas call the same function. It owns one weight.
struct ScriptedImpl : torch::nn::Cloneable<ScriptedImpl> {
  using Function = std::function<torch::Tensor(ScriptedImpl&, torch::Tensor)>;
  explicit ScriptedImpl(Function run) : function(std::move(run)) { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({1})); }
  torch::Tensor forward(torch::Tensor x) { return function(*this, x); }
  Function function;
  torch::Tensor weight;
};
TORCH_MODULE(Scripted);

/// Takes and returns nests of tensors.
struct NestedImpl : torch::nn::Cloneable<NestedImpl> {
  using Dict = std::map<std::string, torch::Tensor>;
  using Output = std::tuple<torch::Tensor, std::vector<torch::Tensor>, Dict, std::optional<torch::Tensor>>;
  NestedImpl() { reset(); }
  void reset() override { fc = register_module("fc", torch::nn::Linear(8, 4)); }
  Output forward(const torch::Tensor& x, const std::pair<torch::Tensor, std::vector<torch::Tensor>>& more,
                 double factor, const torch::Tensor& mask, const std::optional<torch::Tensor>& shift) {
    torch::Tensor y = fc->forward(x) * factor;
    if (mask.defined()) y = y * mask;
    if (shift) y = y + *shift;
    return {y, {more.first + 1, more.second.at(0) * y}, {{"a", y.sum(1)}, {"b", y.argmax(1)}}, shift};
  }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Nested);

/// One tensor under two names; or, untied, two.
struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  explicit TiedImpl(bool is_tied = true) : tied(is_tied) { reset(); }
  void reset() override {
    first = register_parameter("first", torch::ones({8, 8}));
    second = register_parameter("second", tied ? first : torch::ones({8, 8}));
  }
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(x.mm(first)).mm(second); }
  bool tied;
  torch::Tensor first, second;
};
TORCH_MODULE(Tied);

}  // namespace maniple::testing_models
