// Mixed precision: matrix products and convolutions in 16 bits, parameters and sums in 32.
//
//   maniple::GradScaler scaler;                                    // for float16; bfloat16 needs none
//   for (auto& batch : *loader) {
//     optimizer.zero_grad();
//     torch::Tensor loss;
//     {
//       const maniple::Autocast autocast(torch::kCUDA, {.dtype = torch::kFloat16});
//       loss = torch::cross_entropy_loss(ddp(batch.data), batch.target);
//     }                                                            // backward is outside: it computes as forward did
//     scaler.scale(loss).backward();
//     scaler.unscale_(optimizer);                                  // only to look at gradients, or to clip them
//     maniple::clip_grad_norm_(net->parameters(), 1.0);
//     scaler.step(optimizer);                                      // no step if a gradient is infinite or NaN
//     scaler.update();
//   }
//
// Both are those of torch.amp, and so are their numbers. What gradients are communicated in is a matter of
// communication hooks ("fp16", "bf16": comm_hooks.h), whatever they are computed in.
//
// bfloat16 has the range of float32 and needs no scaler. float16 has not: gradients below 6e-8 become zero. So the loss
// is multiplied by a large *scale*, and gradients are divided by it before the step. The scale is found by trying: a
// step with a gradient that is not finite is left out and the scale halved; after growth_interval good steps in a row
// it is doubled.
//
// With DistributedDataParallel the averaged gradients are equal on all ranks, and infinity or NaN on one rank is in the
// average on all ranks: all decide alike, and nothing is communicated. Where ranks hold different parameters
// (fully_shard, tensor_parallel.h, Pipeline; see tensor_layout.h), unscale_ and step make one decision for all ranks
// that divide the parameters. Where gradients differ for other reasons (parameters outside of DistributedDataParallel,
// post-local SGD), `group` does. Inside with_uneven_inputs a rank that shadows keeps up by calling unscale_, step and
// update in its shadow_step too.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct AutocastOptions {
  /// bfloat16 or float16 (on the CPU since LibTorch 2.3). Default: bfloat16 on the CPU, float16 on other devices, as in
  /// PyTorch.
  std::optional<torch::ScalarType> dtype = {};
  /// Off: a region without autocast inside one that has it.
  bool enabled = true;
  /// The 16-bit copy of a weight is kept until the outermost region ends.
  bool cache_enabled = true;
};

/// While it lives, LibTorch's operations in this thread choose 16 or 32 bits by themselves, for tensors of one type of
/// device. May be nested; destroy in the opposite order. DataParallel and checkpoint (activation_checkpoint.h) carry it
/// to where they compute.
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(torch::DeviceType device, const AutocastOptions& options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  torch::DeviceType device_;
  bool enabled_before_;
  bool cache_before_;
  torch::ScalarType dtype_before_;
};

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     ///< above 1
  double backoff_factor = 0.5;  ///< between 0 and 1
  int growth_interval = 2000;   ///< good steps in a row; at least 1
  bool enabled = true;          ///< off: scale returns the loss, step is the optimizer's; the loop stays as it is
  /// More ranks that decide together: one all_reduce of 4 bytes in each step, collective over the group. Parameters
  /// with a layout know their groups.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// On a GPU nothing is waited for, but for the one answer in step() whether the step is taken. One thread at a time.
class GradScaler {
 public:
  /// Throws InvalidArgument for factors that make no sense.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// The loss times the scale, in float32 at least.
  torch::Tensor scale(const torch::Tensor& loss);

  /// Divides the gradients of the optimizer's parameters by the scale, and notes whether all are finite. At most once
  /// between two updates for each optimizer; step() does it otherwise. Throws InvalidArgument for gradients in float16:
  /// dividing them would make zeros of those that the scale has saved.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// The optimizer's step if all gradients are finite. Returns whether it was taken. Once between two updates for each
  /// optimizer.
  bool step(torch::optim::Optimizer& optimizer);

  /// Adapts the scale; after the step of every optimizer. With `new_scale` it becomes that.
  void update(std::optional<double> new_scale = {});

  double get_scale() const;        ///< waits for the device; 1 if it is not enabled
  int get_growth_tracker() const;  ///< good steps since the scale changed; waits for the device
  bool is_enabled() const noexcept;

  // Scale, growth tracker and factors, as text. Checkpoint::add does it.
  std::string state_dict() const;
  void load_state_dict(const std::string& text);  ///< throws ProtocolError for anything else

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace maniple
