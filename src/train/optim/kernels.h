// The arithmetic of optimizers on the CPU: one pass over parameter, gradient and state, for all tensors of a call
// together.
//
// LibTorch's optimizers run about ten operations for each tensor, each of which reads and writes memory again; here
// every element is read once and written once. The loops know no LibTorch, so that they are compiled by themselves,
// with options of their own. a * b + c is never fused: the bits are the same on every processor, and for every number
// of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace maniple {

enum class StepDtype : std::uint8_t { float32, float64, float16, bfloat16 };

/// Which formula. Their names are those of the optimizers; _l2 adds weight_decay * parameter to the gradient first.
enum class StepKernel : std::uint8_t {
  sgd,
  sgd_l2,
  momentum,
  momentum_l2,
  nesterov,
  nesterov_l2,
  adam,  ///< AdamW, too: its decay is `keep`
  adam_l2,
  amsgrad,
  amsgrad_l2,
  lion,
};

/// What is the same for all tensors of a call.
struct StepConstants {
  double lr = 0;
  double beta1 = 0;  ///< momentum of SGD
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;     ///< of the _l2 kernels
  double keep = 1;             ///< the parameter is multiplied by it first: 1 - lr * weight_decay of AdamW and Lion
  double decoupled_decay = 0;  ///< the weight_decay in `keep`, for kernels of others
  double sign = 1;             ///< -1: the objective is to grow
};

/// The memory of one parameter: all of it dense, in the same order.
struct StepTensor {
  void* parameter = nullptr;
  const void* gradient = nullptr;
  float* master = nullptr;  ///< the parameter in float32; then states are float32, too, and `parameter` is only written
  void* states[3] = {};     ///< momentum_buffer; or exp_avg, exp_avg_sq, max_exp_avg_sq
  std::size_t count = 0;
  /// What depends on the number of steps. Adam: lr / (1 - beta1^t), sqrt(1 - beta2^t). SGD: the factors of buffer and
  /// gradient.
  double own[2] = {};
};

/// Steps all tensors, with up to `threads` threads when they are large. All have a master, or none has.
void run_step(StepKernel kernel, StepDtype dtype, const StepConstants& constants, std::span<const StepTensor> tensors,
              int threads);

}  // namespace maniple
