#include <maniple/train/clip_grad.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "comm/base/check.h"
#include "comm/group/tensor_calls.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include "train/tensor_layout.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

constexpr double kTiny = 1e-6;  // as in PyTorch: avoids division by a norm of zero

struct Gradient {
  std::size_t parameter;  ///< index in the list
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

// ---- Few kernels for many GPU tensors, where LibTorch has them ------------------------------------------------------
//
// All tensors of a list have the same device and dtype. On the CPU these kernels would be the same loops.

/// LibTorch got the variant with a dtype for the computation later than the variant without.
template <class DType>
std::vector<torch::Tensor> norms_of(const std::vector<torch::Tensor>& tensors, double p, DType wide) {
  if constexpr (requires { at::_foreach_norm(tensors, p, wide); }) {
    return at::_foreach_norm(tensors, p, wide);
  } else {
    if (tensors.front().scalar_type() == wide) return at::_foreach_norm(tensors, p);
    std::vector<torch::Tensor> norms;
    for (const torch::Tensor& tensor : tensors) {
      norms.push_back(torch::linalg_vector_norm(tensor, p, at::OptionalIntArrayRef(), false, wide));
    }
    return norms;
  }
}

/// LibTorch got the variant with a tensor as factor later, too. (A plain call would take the tensor for a list of one.)
template <class Tensor>
void multiply(const std::vector<Tensor>& tensors, const Tensor& factor) {
  if constexpr (requires { static_cast<void (*)(at::TensorList, const Tensor&)>(&at::_foreach_mul_); }) {
    at::_foreach_mul_(tensors, factor);
  } else {
    for (const Tensor& tensor : tensors) tensor.mul_(factor);
  }
}

void clamp(const std::vector<torch::Tensor>& tensors, double most) {
#if MANIPLE_TORCH_AT_LEAST(2, 1)
  at::_foreach_clamp_min_(tensors, -most);
  at::_foreach_clamp_max_(tensors, most);
#else
  for (const torch::Tensor& tensor : tensors) tensor.clamp_(-most, most);
#endif
}

/// Indices into the list of gradients, by device and dtype.
using Kinds = std::map<std::pair<std::string, torch::ScalarType>, std::vector<std::size_t>>;

Kinds kinds_of(const std::vector<Gradient>& gradients) {
  Kinds kinds;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const torch::Tensor& tensor = gradients[i].tensor;
    // Skipped: the norm of an empty tensor is zero, but the maximum of an empty tensor is an error.
    if (tensor.numel() > 0) kinds[{tensor.device().str(), tensor.scalar_type()}].push_back(i);
  }
  return kinds;
}

std::vector<torch::Tensor> tensors_at(const std::vector<Gradient>& gradients, const std::vector<std::size_t>& places) {
  std::vector<torch::Tensor> tensors;
  for (const std::size_t i : places) tensors.push_back(gradients[i].tensor);
  return tensors;
}

/// The device on which norms are added up. Ranks with gradients on GPUs communicate there, so a rank without gradients
/// has to as well.
torch::Device device_for(const std::vector<Gradient>& gradients, const std::vector<torch::Tensor>& parameters,
                         const std::shared_ptr<ProcessGroup>& group) {
  if (!gradients.empty()) return gradients.front().tensor.device();
  if (!parameters.empty()) return parameters.front().device();
  if (group && !serves_host_tensors(*group)) return torch::empty({0}, torch::Device(torch::kCUDA)).device();
  return torch::kCPU;
}

// ---- Norms of gradients that ranks divide ---------------------------------------------------------------------------

using Groups = std::vector<std::shared_ptr<ProcessGroup>>;

/// The gradients that are divided by the same groups.
struct Share {
  Groups groups;                     ///< outermost first; empty: replicated
  std::vector<torch::Tensor> norms;  ///< on this rank
};

/// The properties of a list of parameters that do not depend on the gradients.
struct Division {
  std::vector<Share> shares;          ///< in the order of the list, so equal on all ranks of the groups
  std::vector<std::size_t> share;     ///< per parameter: index into `shares`
  std::vector<TensorLayout> layouts;  ///< per parameter

  std::size_t share_of(const Groups& groups) {
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (shares[i].groups == groups) return i;
    }
    shares.push_back({groups, {}});
    return shares.size() - 1;
  }
};

/// `given` is the caller's group, for parameters without a layout. It replaces a layout's group that has the same
/// ranks, because a rank without parameters knows no other group.
Division division_of(const std::vector<torch::Tensor>& parameters, const std::shared_ptr<ProcessGroup>& given) {
  Division division;
  division.share_of({});
  bool divided = false, sharded = false, known = given == nullptr;
  for (const torch::Tensor& parameter : parameters) {
    TensorLayout& layout = division.layouts.emplace_back(layout_of(parameter));
    divided = divided || layout.divided();
    sharded = sharded || layout.kind == LayoutKind::fully_sharded;
    for (auto& group : layout.divided_over) {
      if (given && detail::same_ranks(*given, *group)) group = given;
      known = known || group == given;
    }
  }
  MANIPLE_REQUIRE(known || !divided,
                  "clip_grad_norm_: group {} does not divide the parameters; leave the group out, the parameters know "
                  "their own",
                  given->name());
  if (parameters.empty() && given) division.share_of({given});
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const TensorLayout& layout = division.layouts[i];
    MANIPLE_REQUIRE(
        !sharded || layout.divided() || !parameters[i].grad().defined(),
        "clip_grad_norm_: parameter {} of shape [{}] belongs to no unit of fully_shard, while others do, so "
        "no rank averages its gradient; make the root of the model a unit, too",
        i, joined(parameters[i].sizes()));
    division.share.push_back(division.share_of(divided || !given ? layout.divided_over : Groups{given}));
  }
  return division;
}

/// The norm of all shares together. The ranks of a group may have different groups inside it, so the innermost norms
/// are added up first. Computed in float64: dtypes may differ between ranks, and powers of norms are large.
torch::Tensor norm_over_ranks(std::vector<Share> shares, double p, torch::ScalarType wide, torch::Device device) {
  const auto options = torch::TensorOptions().device(device);
  const bool largest = std::isinf(p);
  const auto norm_of = [&](const std::vector<torch::Tensor>& norms) {
    return norms.empty() ? torch::zeros({}, options.dtype(wide)) : torch::linalg_vector_norm(torch::stack(norms), p);
  };
  if (shares.size() == 1 && shares.front().groups.empty()) return norm_of(shares.front().norms);
  std::vector<std::pair<Groups, torch::Tensor>> powers;
  const auto add = [&](const Groups& groups, const torch::Tensor& power) {
    for (auto& [of, sum] : powers) {
      if (of != groups) continue;
      sum = largest ? torch::maximum(sum, power) : sum + power;
      return;
    }
    powers.emplace_back(groups, power);
  };
  for (const Share& share : shares) {
    const torch::Tensor norm = norm_of(share.norms).to(torch::kFloat64);
    add(share.groups, largest ? norm : norm.pow(p));
  }
  for (;;) {
    const auto deepest = std::max_element(powers.begin(), powers.end(),
                                          [](const auto& a, const auto& b) { return a.first.size() < b.first.size(); });
    if (deepest->first.empty()) break;
    auto [groups, power] = std::move(*deepest);
    powers.erase(deepest);
    all_reduce(power, largest ? ReduceOp::max : ReduceOp::sum, {.group = groups.back()}, public_place());
    groups.pop_back();
    add(groups, power);
  }
  const torch::Tensor& all = powers.front().second;
  return (largest ? all : all.pow(1 / p)).to(wide);
}

[[noreturn]] void throw_not_finite(double total, const std::vector<Gradient>& gradients,
                                   const std::vector<torch::Tensor>& norms) {
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!norms[i].defined() || is_finite(norms[i])) continue;
    throw InvalidArgument(
        format_text("clip_grad_norm_: the norm is {}: the gradient of parameter {} of shape [{}] is not finite", total,
                    gradients[i].parameter, joined(gradients[i].tensor.sizes())));
  }
  throw InvalidArgument(
      format_text("clip_grad_norm_: the norm is {}, though each gradient's own is finite here", total));
}

/// The pipeline's group: a rank whose stages have no parameters takes part in the norm, too. Null if there is no
/// pipeline.
std::shared_ptr<ProcessGroup> pipeline_group(const torch::nn::Module& module) {
  if (const auto* partial = dynamic_cast<const PartialModule*>(&module)) return partial->divided_over();
  for (const auto& child : module.named_children()) {
    if (auto group = pipeline_group(*child.value())) return group;
  }
  return nullptr;
}

}  // namespace

torch::Tensor clip_grad_norm_(const std::vector<torch::Tensor>& given, double max_norm, const ClipGradOptions& options,
                              const SourceLocation& where) {
  const PublicCall call("clip_grad_norm_, which all ranks call", options.where.or_else(where));
  const double p = options.norm_type;
  MANIPLE_REQUIRE(max_norm >= 0, "clip_grad_norm_: a max_norm of {}; expected a number that is not negative", max_norm);
  MANIPLE_REQUIRE(p > 0, "clip_grad_norm_: a norm_type of {}; expected a number above 0, or infinity", p);
  if (options.group) options.group->require_member("clip_grad_norm_");
  const torch::NoGradGuard no_grad;
  const std::vector<torch::Tensor> parameters = detail::distinct(given);
  const std::vector<Gradient> gradients = gradients_of(parameters, "clip_grad_norm_");
  Division division = division_of(parameters, options.group);

  auto wide = torch::kFloat32;
  for (const Gradient& gradient : gradients) {
    if (gradient.tensor.scalar_type() == torch::kFloat64) wide = torch::kFloat64;
  }
  const torch::Device device = device_for(gradients, parameters, options.group);
  const Kinds kinds = device.is_cpu() ? Kinds() : kinds_of(gradients);
  std::vector<torch::Tensor> norms(gradients.size());  // undefined for empty gradients
  for (const auto& [kind, places] : kinds) {
    const std::vector<torch::Tensor> own = norms_of(tensors_at(gradients, places), p, wide);
    for (std::size_t i = 0; i < places.size(); ++i) norms[places[i]] = own[i].to(device);
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const torch::Tensor& gradient = gradients[i].tensor;
    if (gradient.numel() == 0) continue;
    if (!norms[i].defined()) {
      norms[i] = torch::linalg_vector_norm(gradient, p, at::OptionalIntArrayRef(), false, wide).to(device);
    }
    const std::size_t parameter = gradients[i].parameter;
    if (division.layouts[parameter].counted) division.shares[division.share[parameter]].norms.push_back(norms[i]);
  }
  const torch::Tensor total = norm_over_ranks(std::move(division.shares), p, wide, device);
  if (options.error_if_nonfinite && !is_finite(total)) throw_not_finite(total.item<double>(), gradients, norms);
  if (gradients.empty() || std::isinf(max_norm)) return total;

  const torch::Tensor factor = (max_norm / (total + kTiny)).clamp_max(1.0);
  if (device.is_cpu()) {
    const double number = factor.item<double>();
    if (number == 1) return total;  // nothing to clip: saves the second pass
    for (const Gradient& gradient : gradients) gradient.tensor.mul_(number);
  }
  for (const auto& [kind, places] : kinds) {
    const torch::Tensor& first = gradients[places.front()].tensor;
    multiply(tensors_at(gradients, places), factor.to(first.device(), first.scalar_type()));
  }
  return total;
}

torch::Tensor clip_grad_norm_(torch::nn::Module& module, double max_norm, const ClipGradOptions& given,
                              const SourceLocation& where) {
  ClipGradOptions options = given;
  if (!options.group) options.group = pipeline_group(module);
  return clip_grad_norm_(module.parameters(), max_norm, options, where);
}

torch::Tensor clip_grad_norm_(const torch::Tensor& parameter, double max_norm, const ClipGradOptions& options,
                              const SourceLocation& where) {
  return clip_grad_norm_(std::vector<torch::Tensor>{parameter}, max_norm, options, where);
}

// A parameter that occurs twice does no harm: clipping is idempotent.
void clip_grad_value_(const std::vector<torch::Tensor>& parameters, double clip_value) {
  MANIPLE_REQUIRE(clip_value >= 0, "clip_grad_value_: a clip_value of {}; expected a number that is not negative",
                  clip_value);
  const torch::NoGradGuard no_grad;
  const std::vector<Gradient> gradients = gradients_of(parameters, "clip_grad_value_");
  if (gradients.empty() || gradients.front().tensor.is_cpu()) {
    for (const Gradient& gradient : gradients) gradient.tensor.clamp_(-clip_value, clip_value);
    return;
  }
  for (const auto& [kind, places] : kinds_of(gradients)) clamp(tensors_at(gradients, places), clip_value);
}

void clip_grad_value_(const torch::Tensor& parameter, double clip_value) {
  clip_grad_value_(std::vector<torch::Tensor>{parameter}, clip_value);
}

}  // namespace maniple
