// Gradient clipping, before the optimizer's step.
//
//   loss.backward();
//   const auto norm = maniple::clip_grad_norm_(net->parameters(), 1.0);     // the norm of all gradients together
//   optimizer.step();
//   metrics.add("gradient norm", norm);                                     // a tensor: the host has not waited for it
//
// The norm counts each element of the model once. With DistributedDataParallel every rank computes the same norm
// without communication. Parameters of fully_shard, tensor_parallel.h and Pipeline record which ranks hold the other
// elements (tensor_layout.h). clip_grad_norm_ then sums the norms over these ranks, and all of them must call it. A
// parameter listed under several names counts once.
//
// Parameters without a gradient are skipped. Dtypes may be mixed. The norm is computed in float32 at least (in float64
// if one of the gradients is float64), so bfloat16 gradients do not lose precision. On the CPU gradients are read once,
// and written only if they are clipped. On a GPU clipping takes a few kernels, and the host waits only with
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
  /// The p of the p-norm: 2, 1, infinity (std::numeric_limits<double>::infinity(): the largest absolute value), or any
  /// other number above 0.
  double norm_type = 2;
  /// An infinite or NaN norm throws InvalidArgument, which names the first parameter with such a gradient, and leaves
  /// gradients unchanged. Off: gradients become zero or NaN, as in PyTorch.
  bool error_if_nonfinite = false;
  /// For parameters that the program divides itself, without set_layout: the ranks whose norms are summed. Each such
  /// parameter is passed on exactly one of these ranks. Parameters with a layout carry their groups; any other group is
  /// rejected. Collective over the group.
  std::shared_ptr<ProcessGroup> group = nullptr;
  SourceLocation where = {};  ///< set by Maniple for calls that it makes itself; empty: the line of the call
};

/// Multiplies all gradients by max_norm / (norm + 1e-6) if that factor is below 1. Returns the norm before clipping:
/// one element, float32 or float64. With max_norm = infinity it only computes the norm. Throws InvalidArgument for a
/// negative or NaN max_norm and for sparse gradients.
torch::Tensor clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                              const ClipGradOptions& options = {},
                              const SourceLocation& where = SourceLocation::current());
torch::Tensor clip_grad_norm_(const torch::Tensor& parameter, double max_norm, const ClipGradOptions& options = {},
                              const SourceLocation& where = SourceLocation::current());
/// The same for all parameters of the module.
torch::Tensor clip_grad_norm_(torch::nn::Module& module, double max_norm, const ClipGradOptions& options = {},
                              const SourceLocation& where = SourceLocation::current());

/// Clamps each element of each gradient to -clip_value .. clip_value. NaN stays NaN.
void clip_grad_value_(const std::vector<torch::Tensor>& parameters, double clip_value);
void clip_grad_value_(const torch::Tensor& parameter, double clip_value);

}  // namespace maniple
