// Gradients that are too long are shortened, before the optimizer's step.
//
//   loss.backward();
//   const auto norm = maniple::clip_grad_norm_(net->parameters(), 1.0);     // the norm of all gradients together
//   optimizer.step();
//   metrics.add("gradient norm", norm);                                     // a tensor: nothing was waited for
//
// The norm counts each element of the model once. With DistributedDataParallel every rank computes the same norm, and
// nothing is communicated. Parameters of fully_shard, of tensor_parallel.h and of a Pipeline know which ranks hold the
// other elements (tensor_layout.h): clip_grad_norm_ adds up their norms over these ranks, which all call it. A
// parameter that a module lists under several names counts once.
//
// Parameters without a gradient are left out. Dtypes may be mixed; the norm is computed in float32 at least (in float64
// if one of the gradients is), so that bfloat16 gradients do not lose it. On the CPU gradients are read once, and
// written only if they are too long. On a GPU all of it is a few kernels, and nothing is waited for but by
// error_if_nonfinite.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct ClipGradOptions {
  /// p of the p-norm: 2, 1, infinity (std::numeric_limits<double>::infinity(): the largest absolute value), or any
  /// other number above 0.
  double norm_type = 2;
  /// A norm that is infinite or NaN throws InvalidArgument, naming the first parameter with such a gradient, and no
  /// gradient is changed. Otherwise, as in PyTorch, gradients then become zero or NaN.
  bool error_if_nonfinite = false;
  /// For parameters that ranks divide by means of their own, without set_layout: the ranks whose norms are added up.
  /// Each parameter is then given on one of these ranks. Parameters with a layout know their groups; another group is
  /// refused. Collective over the group.
  std::shared_ptr<ProcessGroup> group = nullptr;
  SourceLocation where = SourceLocation::current();  ///< the caller's line, for error messages; leave it alone
};

/// Multiplies all gradients by max_norm / (norm + 1e-6) if that is below 1. Returns the norm as it was before: one
/// element, float32 or float64. Throws InvalidArgument for a max_norm that is negative or NaN (infinity: only computes
/// the norm) and for sparse gradients.
torch::Tensor clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                              const ClipGradOptions& options = {});
torch::Tensor clip_grad_norm_(const torch::Tensor& parameter, double max_norm, const ClipGradOptions& options = {});
/// The same of all parameters of the module.
torch::Tensor clip_grad_norm_(torch::nn::Module& module, double max_norm, const ClipGradOptions& options = {});

/// Limits each element of each gradient to -clip_value .. clip_value. NaN stays NaN.
void clip_grad_value_(const std::vector<torch::Tensor>& parameters, double clip_value);
void clip_grad_value_(const torch::Tensor& parameter, double clip_value);

}  // namespace maniple
