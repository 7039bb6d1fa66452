// Gradient accumulation: gradients of several small batches are summed, and the optimizer steps once.
//
//   maniple::Accumulation accumulation(ddp, 4);
//   for (std::size_t i = 0; i < batches; ++i) {
//     const auto scope = accumulation.step(i + 1 == batches);     // only the last backward of four communicates
//     const auto loss = accumulation.scale(loss_of(batch));       // so that the four gradients add up to the mean
//     loss.backward();
//     if (accumulation.ready()) {
//       optimizer.step();
//       optimizer.zero_grad();
//     }
//   }
//
// The gradient is the mean over the group of batches, as if the group had been one batch. This also holds for the last
// group, which may have fewer batches: step(true) ends a group early. If batch sizes differ, pass the number of samples
// to scale(), and the mean is over samples. (Across ranks, DistributedDataParallel weights all ranks equally, or, with
// Average::samples, by their samples in the group; this class sets the weights.)
//
// All ranks have the same number of batches, so they end their groups together. A loop that ends without step(true)
// leaves pending() batches in the gradients, not averaged over the ranks: discard them with zero_grad() and reset().
//
// Threads and lifetime: use it in the thread that runs backward. It refers to the parameters and to `ddp`, which must
// outlive it.
#pragma once

#include <memory>
#include <vector>

#include <torch/types.h>

#include <maniple/export.h>
#include <maniple/train/ddp.h>

namespace MANIPLE_API maniple {

class Accumulation {
 public:
  /// Guard for the forward and backward of one small batch.
  class [[nodiscard]] Step {
   public:
    Step(Step&&) noexcept = default;
    Step& operator=(Step&&) = delete;
    ~Step();

   private:
    friend class Accumulation;
    explicit Step(std::unique_ptr<NoSync> no_sync);
    std::unique_ptr<NoSync> no_sync_;
  };

  /// Every `batches` small batches make one step; at least 1, otherwise InvalidArgument is thrown.
  Accumulation(GradientAverager& ddp, int batches) : Accumulation(&ddp, ddp.trained_parameters(), batches) {}
  /// For one process, without DistributedDataParallel.
  Accumulation(std::vector<torch::Tensor> parameters, int batches)
      : Accumulation(nullptr, std::move(parameters), batches) {}

  /// Begins the next small batch. `is_last`: the group ends with this batch; the same on all ranks.
  Step step(bool is_last = false);

  /// Returns the loss, scaled so that the group's gradients add up to their mean. Call it once per step. `samples`: the
  /// number of samples over which the loss is a mean, if it differs between batches; not negative.
  torch::Tensor scale(const torch::Tensor& loss, double samples = 1);

  /// Whether the group is complete, so that the optimizer may step after this backward.
  bool ready() const noexcept { return ready_; }
  /// Batches whose gradients have not been used by an optimizer step.
  int pending() const noexcept { return ready_ ? 0 : count_; }
  int batches() const noexcept { return batches_; }

  /// Makes the next step begin a new group.
  void reset() noexcept;

 private:
  Accumulation(GradientAverager* ddp, std::vector<torch::Tensor> parameters, int batches);

  GradientAverager* ddp_;
  std::vector<torch::Tensor> parameters_;
  int batches_;
  int count_ = 0;       ///< batches in the group, including the current one
  bool ready_ = false;  ///< the current batch ends the group
  double samples_ = 0;  ///< in the group so far
  double divisor_ = 0;  ///< divisor applied to the group's losses so far
};

}  // namespace maniple
