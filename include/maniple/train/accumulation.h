// A large batch in several small ones: gradients are added up over some backwards, and the optimizer steps once.
//
//   maniple::Accumulation accumulation(ddp, 4);
//   for (std::size_t i = 0; i < batches; ++i) {
//     const auto scope = accumulation.step(i + 1 == batches);     // only the last backward of four communicates
//     const auto loss = accumulation.scale(loss_of(batch));       // so that four add up to the mean
//     loss.backward();
//     if (accumulation.ready()) {
//       optimizer.step();
//       optimizer.zero_grad();
//     }
//   }
//
// The gradient is the mean over the group of batches, as if it had been one batch. This holds for the last group as
// well, which may have fewer batches: step(true) ends a group early. For batches of different sizes give scale() the
// number of samples, and the mean is over samples. (Over ranks, DistributedDataParallel weighs them equally, or with
// Average::samples by the samples of the group, which is set here.)
//
// All ranks have the same number of batches, and so end their groups together. A loop that ends without step(true)
// leaves pending() batches in the gradients, which ranks have not averaged: drop them with zero_grad() and reset().
//
// One thread, that of backward. Keeps references to the gradients' parameters, and to `ddp`, which must outlive it.
#pragma once

#include <memory>
#include <vector>

#include <torch/types.h>

#include <maniple/export.h>
#include <maniple/train/ddp.h>

namespace MANIPLE_API maniple {

class Accumulation {
 public:
  /// While it lives, the backward of one small batch happens.
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

  /// `batches` small ones make a large one; at least 1. Throws InvalidArgument otherwise.
  Accumulation(GradientAverager& ddp, int batches) : Accumulation(&ddp, ddp.trained_parameters(), batches) {}
  /// Without DistributedDataParallel: one process.
  Accumulation(std::vector<torch::Tensor> parameters, int batches)
      : Accumulation(nullptr, std::move(parameters), batches) {}

  /// Begins the next small batch. `is_last`: there is none after it, so the group ends with it; the same on all ranks.
  Step step(bool is_last = false);

  /// The loss, divided such that the group's gradients add up to their mean; call it once in each step. `samples`: that
  /// the loss is a mean of, where batches differ; not negative.
  torch::Tensor scale(const torch::Tensor& loss, double samples = 1);

  /// Whether the group is complete: after this backward, the optimizer may step.
  bool ready() const noexcept { return ready_; }
  /// Batches in the gradients that no optimizer step has had yet.
  int pending() const noexcept { return ready_ ? 0 : count_; }
  int batches() const noexcept { return batches_; }

  /// The next step begins a group.
  void reset() noexcept;

 private:
  Accumulation(GradientAverager* ddp, std::vector<torch::Tensor> parameters, int batches);

  GradientAverager* ddp_;
  std::vector<torch::Tensor> parameters_;
  int batches_;
  int count_ = 0;       ///< of the group, the one under way included
  bool ready_ = false;  ///< the one under way ends the group
  double samples_ = 0;  ///< of the group so far
  double divisor_ = 0;  ///< by which its losses were divided so far
};

}  // namespace maniple
