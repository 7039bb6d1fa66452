// The arithmetic of optimizers on the CPU: one pass over parameter, gradient and state, for all tensors of a call.
//
// LibTorch's optimizers run about ten operations per tensor, and each reads and writes memory again. Here every element
// is read once and written once. The loops do not depend on LibTorch, so they are compiled separately with their own
// options. a * b + c is never fused: results are bitwise the same on every processor and with any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace maniple {

enum class StepDtype : std::uint8_t { float32, float64, float16, bfloat16 };

/// The update formula, named after its optimizer. A kernel with _l2 first adds weight_decay * parameter to the
/// gradient.
enum class StepKernel : std::uint8_t {
  sgd,
  sgd_l2,
  momentum,
  momentum_l2,
  nesterov,
  nesterov_l2,
  adam,  ///< also AdamW, whose decay is `keep`
  adam_l2,
  amsgrad,
  amsgrad_l2,
  lion,
};

/// Values that are the same for all tensors of a call.
struct StepConstants {
  double lr = 0;
  double beta1 = 0;  ///< for SGD, the momentum
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;     ///< used by the _l2 kernels
  double keep = 1;             ///< factor applied to the parameter first; AdamW and Lion: 1 - lr * weight_decay
  double decoupled_decay = 0;  ///< the weight_decay in `keep`, for ATen's fused kernels
  double sign = 1;             ///< -1: maximize the objective
};

/// The memory of one parameter. All of it is dense and in the same order.
struct StepTensor {
  void* parameter = nullptr;
  const void* gradient = nullptr;
  float* master = nullptr;  ///< the parameter in float32; then states are float32, too, and `parameter` is only written
  void* states[3] = {};     ///< momentum_buffer; or exp_avg, exp_avg_sq, max_exp_avg_sq
  std::size_t count = 0;
  /// Values that depend on the number of steps. Adam: lr / (1 - beta1^t), sqrt(1 - beta2^t). SGD: the factors of buffer
  /// and gradient.
  double own[2] = {};
};

/// Steps all tensors, with up to `threads` threads if they are large. Either all tensors have a master or none has.
void run_step(StepKernel kernel, StepDtype dtype, const StepConstants& constants, std::span<const StepTensor> tensors,
              int threads);

}  // namespace maniple
