// Mixed precision: matrix products and convolutions in 16 bits, parameters and sums in 32 bits.
//
//   maniple::GradScaler scaler;                                    // for float16; bfloat16 needs none
//   for (auto& batch : *loader) {
//     optimizer.zero_grad();
//     torch::Tensor loss;
//     {
//       const maniple::Autocast autocast(torch::kCUDA, {.dtype = torch::kFloat16});
//       loss = torch::cross_entropy_loss(ddp(batch.data), batch.target);
//     }                                                            // backward is outside: it uses forward's dtypes
//     scaler.scale(loss).backward();
//     scaler.unscale_(optimizer);                                  // only needed to inspect or clip gradients
//     maniple::clip_grad_norm_(net->parameters(), 1.0);
//     scaler.step(optimizer);                                      // no step if a gradient is infinite or NaN
//     scaler.update();
//   }
//
// Both classes work like their torch.amp namesakes, with the same numbers. The dtype of gradient communication is
// independent: communication hooks ("fp16", "bf16": comm_hooks.h) select it.
//
// bfloat16 has the range of float32 and needs no scaler. float16 does not: gradients below 6e-8 become zero. Therefore
// the loss is multiplied by a large *scale*, and gradients are divided by it before the step. The scale adapts itself:
// a step with a non-finite gradient is skipped and the scale halved; after growth_interval good steps in a row the
// scale is doubled.
//
// With DistributedDataParallel the averaged gradients are equal on all ranks, and infinity or NaN on one rank reaches
// all ranks through the average. All ranks therefore decide alike, without communication. If ranks hold different
// parameters (fully_shard, tensor_parallel.h, Pipeline; see tensor_layout.h), unscale_ and step make one common
// decision for all ranks that divide the parameters. If gradients differ for other reasons (parameters outside
// DistributedDataParallel, post-local SGD), set `group`. Inside with_uneven_inputs, a shadowing rank calls unscale_,
// step and update in its shadow_step.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct AutocastOptions {
  /// bfloat16 or float16 (on the CPU since LibTorch 2.3). Default, as in PyTorch: bfloat16 on the CPU, float16 on other
  /// devices.
  std::optional<torch::ScalarType> dtype = {};
  /// False: turns autocast off inside an enclosing region.
  bool enabled = true;
  /// Keeps the 16-bit copy of a weight until the outermost region ends.
  bool cache_enabled = true;
};

/// While it exists, LibTorch's operations in this thread choose 16 or 32 bits automatically, for tensors of one device
/// type. May be nested; destroy in reverse order. DataParallel and checkpoint (activation_checkpoint.h) carry the
/// setting to the threads and moments in which they compute.
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
  int growth_interval = 2000;   ///< good steps in a row before the scale grows; at least 1
  bool enabled = true;  ///< false: scale() returns the loss, step() calls the optimizer; the loop needs no change
  /// More ranks that decide together: one all_reduce of 4 bytes per step, collective over the group. Not needed for
  /// parameters with a layout, which carry their groups.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// On a GPU the host waits only in step(), for the decision whether to step. One thread at a time.
class GradScaler {
 public:
  /// Throws InvalidArgument for factors out of range.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// Returns the loss times the scale, in float32 at least.
  torch::Tensor scale(const torch::Tensor& loss);

  /// Divides the gradients of the optimizer's parameters by the scale, and records whether all are finite. Call it at
  /// most once per optimizer between two updates; step() calls it otherwise. Throws InvalidArgument for float16
  /// gradients: dividing them would turn the small values that the scale preserved into zeros.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Calls the optimizer's step() if all gradients are finite. Returns whether it did. Once per optimizer between two
  /// updates.
  bool step(torch::optim::Optimizer& optimizer);

  /// Adapts the scale, or sets it to `new_scale`. Call it after the steps of all optimizers.
  void update(std::optional<double> new_scale = {});

  double get_scale() const;        ///< waits for the device; 1 if disabled
  int get_growth_tracker() const;  ///< good steps since the scale changed; waits for the device
  bool is_enabled() const noexcept;

  // Scale, growth tracker and factors, as text. Checkpoint::add saves and loads it.
  std::string state_dict() const;
  void load_state_dict(const std::string& text);  ///< throws ProtocolError for other text

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace maniple
