// The losses l_i of a group, each over n_i samples, must add up to the sum of n_i l_i / N, where N is the sum of all
// n_i. N is known only at the last loss. The earlier losses are divided by the value that N will have if all batches
// are as large as the first. If that assumption was wrong, the accumulated gradients are multiplied by (assumed N) / N
// before the last backward, which is the one that communicates.
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
