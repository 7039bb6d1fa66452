#include "train/optim/stepper.h"

#include <torch/version.h>

#include <ATen/Parallel.h>

#include <optional>

#include "comm/base/check.h"

// LibTorch has _fused_adam_ since 1.13, _fused_adamw_ since 2.0, _foreach_sign_ and _foreach_copy_ since 2.1,
// _fused_sgd_ since 2.3.
#define MANIPLE_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace maniple::optim {
namespace {

using torch::Tensor;

std::optional<StepDtype> step_dtype(torch::ScalarType type) {
  switch (type) {
    case torch::kFloat32: return StepDtype::float32;
    case torch::kFloat64: return StepDtype::float64;
    case torch::kFloat16: return StepDtype::float16;
    case torch::kBFloat16: return StepDtype::bfloat16;
    default: return std::nullopt;
  }
}

bool fits(const Tensor& tensor, const Tensor& like, torch::ScalarType dtype) {
  return tensor.scalar_type() == dtype && tensor.sizes() == like.sizes() && tensor.strides() == like.strides() &&
         tensor.device() == like.device();
}

/// `tensor` in this dtype, with the memory order of `like`, which is dense. Returns `tensor` itself if it already fits.
Tensor fitted(const Tensor& tensor, const Tensor& like, torch::ScalarType dtype) {
  if (fits(tensor, like, dtype)) return tensor;
  return at::empty_strided(like.sizes(), like.strides(), like.options().dtype(dtype)).copy_(tensor);
}

bool is_adam(StepKernel kernel) { return kernel >= StepKernel::adam && kernel <= StepKernel::amsgrad_l2; }
bool is_amsgrad(StepKernel kernel) { return kernel == StepKernel::amsgrad || kernel == StepKernel::amsgrad_l2; }
bool has_momentum(StepKernel kernel) { return kernel >= StepKernel::momentum && kernel <= StepKernel::nesterov_l2; }
bool is_nesterov(StepKernel kernel) { return kernel == StepKernel::nesterov || kernel == StepKernel::nesterov_l2; }

}  // namespace

Stepper::Stepper(MasterWeights& masters, torch::optim::Optimizer& optimizer, const char* name) : masters_(masters) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      MANIPLE_REQUIRE(gradient.layout() == torch::kStrided,
                      "optim::{}: the gradient of parameter {} of group {} is sparse; expected dense ones (nothing was "
                      "changed; torch::optim::SGD and Adagrad take sparse ones)",
                      name, i, g);
    }
  }
}

void Stepper::begin_group(StepKernel kernel, const StepConstants& constants) {
  kernel_ = kernel;
  constants_ = constants;
  constants_.sign = masters_.step_options().maximize ? -1 : 1;
  ++group_;
}

Stepper::Batch& Stepper::batch_of(const Tensor& parameter, bool on_cpu, std::int64_t step,
                                  const std::array<double, 2>& own) {
  // The latest first: consecutive parameters mostly belong to the same batch.
  for (auto batch = batches_.rbegin(); batch != batches_.rend() && batch->group == group_; ++batch) {
    if (batch->device == parameter.device() && batch->dtype == parameter.scalar_type() &&
        (on_cpu || batch->step == step))
      return *batch;
  }
  Batch& fresh = batches_.emplace_back();
  fresh.kernel = kernel_;
  fresh.constants = constants_;
  fresh.group = group_;
  fresh.device = parameter.device();
  fresh.dtype = parameter.scalar_type();
  fresh.step = step;
  fresh.own = own;
  return fresh;
}

void Stepper::add(const Tensor& parameter, std::array<Tensor*, 3> states, int state_count, std::int64_t step,
                  std::array<double, 2> own) {
  const torch::ScalarType dtype = parameter.scalar_type();
  const bool has_master =
      masters_.step_options().master_weights && (dtype == torch::kFloat16 || dtype == torch::kBFloat16);
  const torch::ScalarType state_dtype = has_master ? torch::kFloat32 : dtype;

  Tensor dense = parameter;
  if (!dense.is_non_overlapping_and_dense()) {
    dense = dense.contiguous();
    results_.push_back({dense, parameter});
  }
  for (int s = 0; s < state_count; ++s) {
    Tensor& state = *states[s];
    if (!state.defined()) {
      state = at::empty_strided(dense.sizes(), dense.strides(), dense.options().dtype(state_dtype)).zero_();
    } else if (!fits(state, dense, state_dtype)) {
      MANIPLE_REQUIRE(state.sizes() == dense.sizes(), "an optimizer's state has shape [{}], its parameter [{}]",
                      joined(state.sizes()), joined(dense.sizes()));
      state = fitted(state, dense, state_dtype);  // loaded from a checkpoint, or the parameter was converted
    }
  }
  Tensor master;
  if (has_master) {
    master = masters_.master_weight(parameter);
    if (!master.defined() || !fits(master, dense, torch::kFloat32)) {
      master = fitted(master.defined() ? master : dense, dense, torch::kFloat32);
      masters_.set_master_weight(parameter, master);
    }
  }
  if (parameter.numel() == 0) return;  // without an address, a kernel could not detect whether there is a master
  changed_.push_back(parameter);

  const bool on_cpu = parameter.device().is_cpu() && step_dtype(dtype);
  Batch& batch = batch_of(parameter, on_cpu, step, own);
  if (on_cpu) {
    Tensor gradient = fitted(parameter.grad(), dense, dtype);
    StepTensor& tensor = batch.tensors.emplace_back();
    tensor.parameter = dense.data_ptr();
    tensor.gradient = gradient.data_ptr();
    tensor.master = has_master ? static_cast<float*>(master.data_ptr()) : nullptr;
    for (int s = 0; s < state_count; ++s) tensor.states[s] = states[s]->data_ptr();
    tensor.count = dense.numel();
    tensor.own[0] = own[0], tensor.own[1] = own[1];
    if (!gradient.is_same(parameter.grad())) kept_.push_back(std::move(gradient));
    return;
  }
  if (has_master) {
    masters_stepped_.push_back(master);
    rounded_.push_back(dense);
  }
  batch.gradients.push_back(fitted(parameter.grad(), dense, state_dtype));
  batch.parameters.push_back(has_master ? master : dense);
  for (int s = 0; s < state_count; ++s) batch.more[s].push_back(*states[s]);
}

bool Stepper::run_fused(Batch& batch) {
  if (!batch.device.is_cuda() || !step_dtype(batch.dtype)) return false;
  const StepConstants& c = batch.constants;
  const bool maximize = c.sign < 0;
  if (is_adam(batch.kernel)) {
    // The kernel reads the number of steps on the device. It is the same for all parameters and is filled in there, so
    // that the host does not wait.
    const Tensor step = at::full({}, static_cast<double>(batch.step),
                                 torch::TensorOptions().dtype(torch::kFloat32).device(batch.device));
    const std::vector<Tensor> steps(batch.parameters.size(), step);
#if MANIPLE_TORCH_AT_LEAST(2, 0)
    if (c.keep != 1) {
      at::_fused_adamw_(batch.parameters, batch.gradients, batch.more[0], batch.more[1], batch.more[2], steps, c.lr,
                        c.beta1, c.beta2, c.decoupled_decay, c.eps, is_amsgrad(batch.kernel), maximize);
      return true;
    }
#endif
    if (c.keep != 1) at::_foreach_mul_(batch.parameters, at::Scalar(c.keep));
    at::_fused_adam_(batch.parameters, batch.gradients, batch.more[0], batch.more[1], batch.more[2], steps, c.lr,
                     c.beta1, c.beta2, c.weight_decay, c.eps, is_amsgrad(batch.kernel), maximize);
    return true;
  }
#if MANIPLE_TORCH_AT_LEAST(2, 3)
  if (batch.kernel < StepKernel::adam) {
    at::_fused_sgd_(batch.parameters, batch.gradients, batch.more[0], c.weight_decay, c.beta1, c.lr, c.beta2,
                    is_nesterov(batch.kernel), maximize, has_momentum(batch.kernel) && batch.step == 1);
    return true;
  }
#endif
  return false;
}

void Stepper::run_list(Batch& batch) {
  const StepConstants& c = batch.constants;
  std::vector<Tensor>& p = batch.parameters;
  std::vector<Tensor> g = c.sign < 0 ? at::_foreach_neg(batch.gradients) : batch.gradients;
  if (c.weight_decay != 0) g = at::_foreach_add(g, p, at::Scalar(c.weight_decay));
  if (batch.kernel == StepKernel::lion) {
    std::vector<Tensor> direction = at::_foreach_mul(batch.more[0], at::Scalar(c.beta1));
    at::_foreach_add_(direction, g, at::Scalar(1 - c.beta1));
#if MANIPLE_TORCH_AT_LEAST(2, 1)
    at::_foreach_sign_(direction);
#else
    for (Tensor& one : direction) one.sign_();
#endif
    if (c.keep != 1) at::_foreach_mul_(p, at::Scalar(c.keep));
    at::_foreach_add_(p, direction, at::Scalar(-c.lr));
    at::_foreach_mul_(batch.more[0], at::Scalar(c.beta2));
    at::_foreach_add_(batch.more[0], g, at::Scalar(1 - c.beta2));
  } else if (is_adam(batch.kernel)) {
    if (c.keep != 1) at::_foreach_mul_(p, at::Scalar(c.keep));
    at::_foreach_mul_(batch.more[0], at::Scalar(c.beta1));
    at::_foreach_add_(batch.more[0], g, at::Scalar(1 - c.beta1));
    at::_foreach_mul_(batch.more[1], at::Scalar(c.beta2));
    at::_foreach_addcmul_(batch.more[1], g, g, at::Scalar(1 - c.beta2));
    if (is_amsgrad(batch.kernel)) {
      for (std::size_t i = 0; i < p.size(); ++i) at::max_out(batch.more[2][i], batch.more[2][i], batch.more[1][i]);
    }
    std::vector<Tensor> denominator = at::_foreach_sqrt(is_amsgrad(batch.kernel) ? batch.more[2] : batch.more[1]);
    at::_foreach_div_(denominator, at::Scalar(batch.own[1]));
    at::_foreach_add_(denominator, at::Scalar(c.eps));
    at::_foreach_addcdiv_(p, batch.more[0], denominator, at::Scalar(-batch.own[0]));
  } else {
    if (has_momentum(batch.kernel)) {
      at::_foreach_mul_(batch.more[0], at::Scalar(batch.own[0]));
      at::_foreach_add_(batch.more[0], g, at::Scalar(batch.own[1]));
      g = is_nesterov(batch.kernel) ? at::_foreach_add(g, batch.more[0], at::Scalar(c.beta1)) : batch.more[0];
    }
    at::_foreach_add_(p, g, at::Scalar(-c.lr));
  }
}

void Stepper::run() {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  for (Batch& batch : batches_) {
    if (!batch.tensors.empty()) {
      run_step(batch.kernel, *step_dtype(batch.dtype), batch.constants, batch.tensors, threads);
    } else if (!run_fused(batch)) {
      run_list(batch);
    }
  }
#if MANIPLE_TORCH_AT_LEAST(2, 1)
  if (!rounded_.empty()) at::_foreach_copy_(rounded_, masters_stepped_);
#else
  for (std::size_t i = 0; i < rounded_.size(); ++i) rounded_[i].copy_(masters_stepped_[i]);
#endif
  for (Copy& result : results_) result.to.copy_(result.from);
  // Notifies graphs that still need the old values, as an in-place operation would.
  for (const Tensor& parameter : changed_) {
    if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace maniple::optim
