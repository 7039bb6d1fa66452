// A group's losses l_i of n_i samples shall add up to the sum of n_i l_i / N, with N the sum of n_i. N is only known
// with the last of them, so the others are divided by what N will be if all are like the first; if that was wrong, the
// gradients so far are multiplied by (what was assumed) / N before the last backward, which is the one that
// communicates.
#include <maniple/train/accumulation.h>

#include <torch/torch.h>

#include <cmath>
#include <utility>

#include "comm/base/check.h"
#include "train/tensor_layout.h"

namespace maniple {

Accumulation::Step::Step(std::unique_ptr<NoSync> no_sync) : no_sync_(std::move(no_sync)) {}
Accumulation::Step::~Step() = default;

Accumulation::Accumulation(GradientAverager* ddp, std::vector<torch::Tensor> parameters, int batches)
    : ddp_(ddp), parameters_(detail::distinct(parameters)), batches_(batches) {
  MANIPLE_REQUIRE(batches >= 1, "Accumulation: over {} batches; expected at least 1", batches);
}

void Accumulation::reset() noexcept {
  count_ = 0;
  ready_ = false;
  samples_ = 0;
  divisor_ = 0;
}

Accumulation::Step Accumulation::step(bool is_last) {
  if (ready_) reset();
  ++count_;
  ready_ = is_last || count_ == batches_;
  const bool silent = ddp_ != nullptr && !ready_;
  return Step(silent ? std::unique_ptr<NoSync>(new NoSync(ddp_->no_sync())) : nullptr);
}

torch::Tensor Accumulation::scale(const torch::Tensor& loss, double samples) {
  MANIPLE_REQUIRE(count_ > 0, "Accumulation: scale() before step()");
  MANIPLE_REQUIRE(samples >= 0 && std::isfinite(samples),
                  "Accumulation: a loss of {} samples; expected a number of samples", samples);
  samples_ += samples;
  if (divisor_ == 0) divisor_ = samples * batches_;
  if (ready_) {
    MANIPLE_REQUIRE(samples_ > 0, "Accumulation: none of the {} batches of a group has a sample", count_);
    if (divisor_ != samples_ && divisor_ > 0 && count_ > 1) {
      const torch::NoGradGuard no_grad;
      for (const torch::Tensor& parameter : parameters_) {
        if (parameter.grad().defined()) parameter.grad().mul_(divisor_ / samples_);
      }
    }
    divisor_ = samples_;
    if (ddp_ != nullptr && ddp_->options().average == Average::samples) ddp_->set_weight(samples_);
  }
  // The mean of an empty batch is NaN, but its gradients are zero.
  if (samples == 0) return torch::nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0;
  return loss * (samples / divisor_);
}

}  // namespace maniple
