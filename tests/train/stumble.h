// Passes a tensor on unchanged; its backward throws when told to: the user's own code that fails.
#pragma once

#include <stdexcept>

#include <torch/torch.h>

namespace maniple {

struct Stumble : torch::autograd::Function<Stumble> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x, bool stumble) {
    context->saved_data["stumble"] = stumble;
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    if (context->saved_data["stumble"].toBool()) throw std::runtime_error("stumbled");
    return {gradients[0], torch::Tensor()};
  }
};

}  // namespace maniple
