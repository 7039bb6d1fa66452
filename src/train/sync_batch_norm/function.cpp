// Terms: a *value* is an element of the input. Each channel has `count` values on this rank and `total` on all ranks.
//
// forward    Every rank computes mean and variance (about its own mean) of its values, and gathers all ranks' values:
//              mean = sum(n_r mean_r) / total,  var = sum(n_r (var_r + (mean_r - mean)^2)) / total
//            This is exact for any n_r, and accurate even if the mean is large compared with the deviation.
// backward   With x^ = (x - mean) / sqrt(var + eps), and sums over the values of all ranks:
//              dx = weight / sqrt(var + eps) (dy - sum(dy) / total - x^ sum(dy x^) / total)
//              dweight = sum(dy x^), dbias = sum(dy), both over this rank's values
//
// LibTorch's fused kernels make the expensive passes. On the CPU these are its kernels of batch norm in evaluation,
// with the batch's statistics instead of the running ones: they compute x^ weight + bias and the two sums. For GPUs
// LibTorch has one kernel for each of these steps, which take 1 / sqrt(var + eps) (*invstd*) instead of the variance;
// the host never waits.
#include "train/sync_batch_norm/function.h"

#include <ATen/ops/batch_norm_native.h>

#include <array>
#include <cmath>

#include "comm/base/check.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include <maniple/dist.h>
#include <maniple/train/tensor_nest.h>

namespace maniple {
namespace {

using torch::Tensor;

struct GroupHolder : torch::CustomClassHolder {
  explicit GroupHolder(std::shared_ptr<ProcessGroup> held) : group(std::move(held)) {}
  std::shared_ptr<ProcessGroup> group;
};

/// Converts to the dtype and layout that the kernels prefer.
Tensor ready(const Tensor& tensor, torch::MemoryFormat format) {
  const auto dtype = tensor.scalar_type();
  const bool reduced = dtype == torch::kBFloat16 || dtype == torch::kHalf;
  return (reduced ? tensor.to(torch::kFloat32) : tensor).contiguous(format);
}
Tensor as(const Tensor& tensor, const Tensor& like) {
  return tensor.defined() ? tensor.to(like.scalar_type()) : tensor;
}

/// If backward throws, the other ranks wait for this rank in a layer that it will not reach, and its next forward would
/// be matched with that layer.
void abort_if_backward_throws(const std::shared_ptr<ProcessGroup>& group) {
  IfBackwardThrows::call([group] {
    if (group->error()) return;
    try {
      group->abort(format_text(
          "backward failed on rank {} (its own output says why) after SyncBatchNorm had communicated in it; going on "
          "would mix the statistics of different layers. Make a new group, or start again from a checkpoint",
          group->rank()));
    } catch (...) {
      // No memory for the text: other ranks wait until their deadline.
    }
  });
}

struct Statistics {
  Tensor mean, var;  // float64
  double total = 0;
};

/// Collective.
Statistics over_all_ranks(const Tensor& x, const std::shared_ptr<ProcessGroup>& group) {
  const std::int64_t channels = x.size(1);
  const auto real = x.options().dtype(torch::kFloat64);
  const Tensor own = torch::zeros({2 * channels + 1}, real);
  if (x.numel() > 0) {
    const auto [mean, var] = at::batch_norm_update_stats(x, {}, {}, 0);
    own.narrow(0, 0, channels).copy_(mean);
    own.narrow(0, channels, channels).copy_(var);
    own[2 * channels] = static_cast<double>(x.numel() / channels);
  }
  const Tensor all = torch::empty({group->size(), 2 * channels + 1}, real);
  all_gather_into_tensor(all, own, {.group = group}, public_place());
  const Tensor counts = all.narrow(1, 2 * channels, 1), means = all.narrow(1, 0, channels);
  const Tensor vars = all.narrow(1, channels, channels);
  Statistics result;
  result.total = counts.sum().item<double>();
  if (result.total == 0) return result;
  result.mean = (counts * means).sum(0) / result.total;
  result.var = (counts * (vars + (means - result.mean).square())).sum(0) / result.total;
  return result;
}

void follow(const Tensor& running, const Tensor& batch, double momentum) {
  if (running.defined()) running.copy_(running.to(torch::kFloat64) * (1 - momentum) + batch * momentum);
}

/// (x - mean) / sqrt(var + eps) * weight + bias, in one pass.
Tensor normalised(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean, const Tensor& var,
                  double eps) {
  return std::get<0>(at::native_batch_norm(x, weight, bias, mean, var, /*training=*/false, 0, eps));
}

// ---- On a GPU -------------------------------------------------------------------------------------------------------

/// The count of a rank without values. LibTorch's kernel divides by partial sums of counts, so the count cannot be 0;
/// compared with any other count this one is negligible.
constexpr double kNoValues = 1e-20;

struct DeviceStatistics {
  Tensor mean, invstd;  // over all ranks; float32 for short types, otherwise as the input
  Tensor counts;        // of each rank, int32
  double total = -1;    // -1: more than 1
};

/// Collective. Also updates the running statistics. The number of values is read only where it may be too small: a rank
/// that has two values itself knows that there are enough.
DeviceStatistics over_all_ranks_on_device(const Tensor& x, const BatchNormTensors& own, double momentum, double eps,
                                          const std::shared_ptr<ProcessGroup>& group) {
  const std::int64_t channels = x.size(1), count = x.numel() / channels;
  const auto real = x.options().dtype(x.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32);
  Tensor mean, invstd;
  if (x.numel() > 0) {
    std::tie(mean, invstd) = at::batch_norm_stats(x, eps);
  } else {
    mean = torch::zeros({channels}, real);
    invstd = torch::ones({channels}, real);
  }
  const Tensor mine =
      torch::cat({mean, invstd, torch::full({1}, count > 0 ? static_cast<double>(count) : kNoValues, real)});
  const Tensor all = torch::empty({group->size(), 2 * channels + 1}, real);
  all_gather_into_tensor(all, mine, {.group = group}, public_place());
  const Tensor counts = all.select(1, 2 * channels);
  DeviceStatistics result;
  if (count <= 1 && !is_capturing(x.device())) {
    result.total = std::round(counts.sum().item<double>());
    if (result.total <= 1) return result;
  }
  // The kernel requires them in the dtype in which it computes.
  const Tensor running_mean = as(own.running_mean, mean), running_var = as(own.running_var, mean);
  std::tie(result.mean, result.invstd) =
      at::batch_norm_gather_stats_with_counts(mean, all.narrow(1, 0, channels), all.narrow(1, channels, channels),
                                              running_mean, running_var, momentum, eps, counts);
  if (own.running_mean.defined() && !own.running_mean.is_same(running_mean)) own.running_mean.copy_(running_mean);
  if (own.running_var.defined() && !own.running_var.is_same(running_var)) own.running_var.copy_(running_var);
  result.counts = counts.to(torch::kInt32);
  return result;
}

/// This rank's share of the gradients of the input (if `needed`), weight and bias. Collective if `needed`.
std::array<Tensor, 3> backward_on_device(const Tensor& input, const Tensor& gradient, const Tensor& weight,
                                         const Tensor& mean, const Tensor& invstd, const Tensor& counts, bool needed,
                                         const std::shared_ptr<ProcessGroup>& group) {
  const auto format = input.suggest_memory_format();
  const Tensor x = input.contiguous(format), dy = gradient.contiguous(format), scale = as(weight, mean);
  Tensor sum_dy, sum_dy_xmu, dweight, dbias;
  if (x.numel() > 0) {
    std::tie(sum_dy, sum_dy_xmu, dweight, dbias) =
        at::batch_norm_backward_reduce(dy, x, mean, invstd, scale, true, scale.defined(), scale.defined());
  } else {
    sum_dy = torch::zeros_like(mean);
    sum_dy_xmu = dweight = dbias = sum_dy;
  }
  Tensor dx;
  if (needed) {
    const Tensor sums = torch::stack({sum_dy, sum_dy_xmu});
    abort_if_backward_throws(group);
    all_reduce(sums, ReduceOp::sum, {.group = group}, public_place());
    dx = x.numel() > 0 ? at::batch_norm_backward_elemt(dy, x, mean, invstd, scale, sums[0], sums[1], counts)
                       : torch::zeros_like(input);
  }
  return {dx, dweight, dbias};
}

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  /// Takes `weight` and `bias` again, as arguments that autograd connects; it does not accept undefined tensors.
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& input,
                        const detail::TorchOptional<Tensor>&, const detail::TorchOptional<Tensor>&,
                        const BatchNormTensors& own, double momentum, double eps,
                        const std::shared_ptr<ProcessGroup>& group) {
    if (input.is_cuda()) return forward_on_device(context, input, own, momentum, eps, group);
    const auto& [weight, bias, running_mean, running_var] = own;
    const Tensor x = ready(input, input.suggest_memory_format());
    const Statistics batch = over_all_ranks(x, group);
    keep(context, input, batch.total, eps, group);
    Tensor output = torch::empty_like(input);
    Tensor mean, var;
    if (batch.total > 0) {
      follow(running_mean, batch.mean, momentum);
      follow(running_var, batch.var * (batch.total / (batch.total - 1)), momentum);
      mean = as(batch.mean, x);
      var = as(batch.var, x);
      if (x.numel() > 0) {
        output = normalised(x, as(weight, x), as(bias, x), mean, var, eps).to(input.scalar_type());
      }
    }
    context->save_for_backward({input, weight, mean, var});
    return output;
  }

  static void keep(torch::autograd::AutogradContext* context, const Tensor& input, double total, double eps,
                   const std::shared_ptr<ProcessGroup>& group) {
    MANIPLE_REQUIRE(total != 1,
                    "SyncBatchNorm: Expected more than 1 value per channel when training, got one on all {} ranks "
                    "together; input size [{}] here",
                    group->size(), joined(input.sizes()));
    context->saved_data["needed"] = input.requires_grad();
    context->saved_data["total"] = total;
    context->saved_data["eps"] = eps;
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<GroupHolder>(group));
  }

  static Tensor forward_on_device(torch::autograd::AutogradContext* context, const Tensor& input,
                                  const BatchNormTensors& own, double momentum, double eps,
                                  const std::shared_ptr<ProcessGroup>& group) {
    const Tensor x = input.contiguous(input.suggest_memory_format());
    const DeviceStatistics batch = over_all_ranks_on_device(x, own, momentum, eps, group);
    keep(context, input, batch.total, eps, group);
    context->save_for_backward({input, own.weight, batch.mean, batch.invstd, batch.counts});
    if (x.numel() == 0) return torch::empty_like(input);
    return at::batch_norm_elemt(x, as(own.weight, batch.mean), as(own.bias, batch.mean), batch.mean, batch.invstd, eps);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (torch::GradMode::is_enabled()) {
      throw Unsupported("SyncBatchNorm: backward with create_graph is not supported");
    }
    const PublicCall call("the backward of SyncBatchNorm");
    const auto saved = context->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &var = saved[3];
    const double total = context->saved_data["total"].toDouble(), eps = context->saved_data["eps"].toDouble();
    const auto group = c10::static_intrusive_pointer_cast<GroupHolder>(context->saved_data["group"].toCapsule())->group;
    if (input.is_cuda() && total != 0) {
      const auto [dx, dweight, dbias] = backward_on_device(input, gradients[0], weight, mean, var, saved[4],
                                                           context->saved_data["needed"].toBool(), group);
      if (!weight.defined()) return {dx, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
      return {dx, as(dweight, weight), as(dbias, weight), Tensor(), Tensor(), Tensor(), Tensor()};
    }
    const auto format = input.suggest_memory_format();
    const Tensor x = ready(input, format), dy = ready(gradients[0], format), scale = as(weight, x);

    Tensor dweight = torch::zeros({x.size(1)}, x.options()), dbias = torch::zeros_like(dweight);
    if (x.numel() > 0) {
      std::tie(std::ignore, dweight, dbias) =
          at::native_batch_norm_backward(dy, x, scale, mean, var, {}, {}, /*train=*/false, eps, {false, true, true});
    }
    Tensor dx;
    if (context->saved_data["needed"].toBool()) {
      const Tensor sums = torch::stack({dbias, dweight}).to(torch::kFloat64);
      if (total > 0) {
        abort_if_backward_throws(group);
        all_reduce(sums, ReduceOp::sum, {.group = group}, public_place());
      }
      dx = torch::zeros_like(x);
      if (x.numel() > 0) {
        Tensor factor = (var.to(torch::kFloat64) + eps).rsqrt();
        if (weight.defined()) factor = factor * weight.to(torch::kFloat64);
        const Tensor of_x = as(-factor * sums[1] / total, x), of_one = as(-factor * sums[0] / total, x);
        dx = normalised(x, of_x, of_one, mean, var, eps);
        std::vector<std::int64_t> along_channels(x.dim(), 1);
        along_channels[1] = -1;
        dx.addcmul_(dy, as(factor, x).view(along_channels));
      }
      dx = dx.to(input.scalar_type());
    }
    if (!weight.defined()) return {dx, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    return {dx, as(dweight, weight), as(dbias, weight), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor plain_batch_norm(const Tensor& input, const BatchNormTensors& own, bool training, double momentum, double eps) {
  return at::native::batch_norm(input, own.weight, own.bias, own.running_mean, own.running_var, training, momentum, eps,
                                at::globalContext().userEnabledCuDNN());
}

Tensor sync_batch_norm(const Tensor& input, const BatchNormTensors& own, double momentum, double eps,
                       const std::shared_ptr<ProcessGroup>& group) {
  if (group->size() > 1) {
    const PublicCall call("the forward of SyncBatchNorm");
    const auto optional = [](const Tensor& tensor) {
      return tensor.defined() ? detail::TorchOptional<Tensor>(tensor) : detail::TorchOptional<Tensor>();
    };
    return SyncBatchNormFunction::apply(input, optional(own.weight), optional(own.bias), own, momentum, eps, group);
  }
  MANIPLE_REQUIRE(input.numel() != input.size(1),
                  "SyncBatchNorm: Expected more than 1 value per channel when training, got input size [{}]",
                  joined(input.sizes()));
  return plain_batch_norm(input, own, true, momentum, eps);
}

}  // namespace maniple
