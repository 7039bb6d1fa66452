#include <maniple/train/clip_grad.h>

#include <torch/torch.h>

#include <cmath>

#include "base/check.h"

namespace maniple {
namespace {

constexpr double kTiny = 1e-6;  // as in PyTorch: a norm of zero is not divided by

struct Gradient {
  std::size_t parameter;  ///< its place in the list
  torch::Tensor tensor;
};

std::vector<Gradient> gradients_of(const std::vector<torch::Tensor>& parameters, const char* function) {
  std::vector<Gradient> gradients;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    MANIPLE_REQUIRE(parameters[i].defined(), "{}: parameter {} is undefined", function, i);
    const torch::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined()) continue;
    MANIPLE_REQUIRE(gradient.layout() == torch::kStrided,
                    "{}: the gradient of parameter {} is sparse; expected dense ones", function, i);
    gradients.push_back({i, gradient.detach()});
  }
  return gradients;
}

bool is_finite(const torch::Tensor& one) { return std::isfinite(one.item<double>()); }

}  // namespace

torch::Tensor clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                              const ClipGradOptions& options) {
  const double p = options.norm_type;
  MANIPLE_REQUIRE(max_norm >= 0, "clip_grad_norm_: a max_norm of {}; expected a number that is not negative", max_norm);
  MANIPLE_REQUIRE(p > 0, "clip_grad_norm_: a norm_type of {}; expected a number above 0, or infinity", p);
  if (options.group) options.group->require_member("clip_grad_norm_");
  const torch::NoGradGuard no_grad;
  const std::vector<Gradient> gradients = gradients_of(parameters, "clip_grad_norm_");

  auto wide = torch::kFloat32;
  for (const Gradient& gradient : gradients) {
    if (gradient.tensor.scalar_type() == torch::kFloat64) wide = torch::kFloat64;
  }
  const torch::Device device = gradients.empty() ? torch::Device(torch::kCPU) : gradients.front().tensor.device();
  const bool largest = std::isinf(p);
  std::vector<torch::Tensor> norms;
  for (const Gradient& gradient : gradients) {
    // The norm of nothing is zero; the largest element of nothing would be an error.
    if (gradient.tensor.numel() == 0) continue;
    norms.push_back(torch::linalg_vector_norm(gradient.tensor, p, at::OptionalIntArrayRef(), false, wide).to(device));
  }
  torch::Tensor total = norms.empty() ? torch::zeros({}, torch::TensorOptions().dtype(wide).device(device))
                                      : torch::linalg_vector_norm(torch::stack(norms), p);
  if (options.group && options.group->size() > 1) {
    // In float64: ranks may have different dtypes, and powers of norms are large.
    double sum = total.item<double>();
    if (!largest) sum = std::pow(sum, p);
    options.group->all_reduce(buffer_of(sum), largest ? ReduceOp::max : ReduceOp::sum);
    total = torch::full({}, largest ? sum : std::pow(sum, 1 / p), torch::TensorOptions().dtype(wide).device(device));
  }

  if (options.error_if_nonfinite && !is_finite(total)) {
    std::size_t place = 0;
    for (const Gradient& gradient : gradients) {
      if (gradient.tensor.numel() == 0) continue;
      if (!is_finite(norms[place++])) {
        throw InvalidArgument(
            format_text("clip_grad_norm_: the norm is {}: the gradient of parameter {} of shape [{}] is not finite",
                        total.item<double>(), gradient.parameter, joined(gradient.tensor.sizes())));
      }
    }
    throw InvalidArgument(format_text("clip_grad_norm_: the norm is {}, though each gradient's own is finite here",
                                      total.item<double>()));
  }
  if (gradients.empty() || std::isinf(max_norm)) return total;

  const torch::Tensor factor = (max_norm / (total + kTiny)).clamp_max(1.0);
  if (device.is_cpu()) {
    const double number = factor.item<double>();
    if (number == 1) return total;  // short enough: no second pass
    for (const Gradient& gradient : gradients) gradient.tensor.mul_(number);
  } else {
    for (const Gradient& gradient : gradients) {
      gradient.tensor.mul_(factor.to(gradient.tensor.device(), gradient.tensor.scalar_type()));
    }
  }
  return total;
}

torch::Tensor clip_grad_norm_(const torch::Tensor& parameter, double max_norm, const ClipGradOptions& options) {
  return clip_grad_norm_(std::vector<torch::Tensor>{parameter}, max_norm, options);
}

void clip_grad_value_(const std::vector<torch::Tensor>& parameters, double clip_value) {
  MANIPLE_REQUIRE(clip_value >= 0, "clip_grad_value_: a clip_value of {}; expected a number that is not negative",
                  clip_value);
  const torch::NoGradGuard no_grad;
  for (const Gradient& gradient : gradients_of(parameters, "clip_grad_value_")) {
    gradient.tensor.clamp_(-clip_value, clip_value);
  }
}

void clip_grad_value_(const torch::Tensor& parameter, double clip_value) {
  clip_grad_value_(std::vector<torch::Tensor>{parameter}, clip_value);
}

}  // namespace maniple
