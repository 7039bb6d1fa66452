// Averages over virtual ranks instead of ranks: tree_average.h.
#include "comm/base/check.h"
#include "train/ddp/reducer.h"

namespace maniple::detail {

void Reducer::use_virtual_ranks(int total) {
  const auto refuse = [](const char* what) {
    throw InvalidArgument(
        format_text("virtual_ranks cannot be combined with {}: it fixes how gradients are added", what));
  };
  if (hook_) refuse("a communication hook");
  if (steps_in_backward_) refuse("apply_optimizer_in_backward");
  if (active_.started()) refuse("with_uneven_inputs");
  if (options_.average != Average::ranks) refuse("DdpOptions::average = Average::samples");
  if (options_.static_graph) refuse("DdpOptions::static_graph (find_unused_parameters does the same)");
  MANIPLE_ASSERT(buckets_.empty() && !computes());
  for (const Parameter& parameter : parameters_) {
    MANIPLE_REQUIRE(parameter.device.is_cpu(),
                    "virtual_ranks: parameter {} is on {}; virtual ranks train on the CPU only", parameter.name,
                    parameter.device.str());
  }
  tree_.emplace(group_, total);
}

void Reducer::keep_gradients() {
  std::vector<const Parameter*> unused;
  for (const Parameter& parameter : parameters_) {
    if (!parameter.accumulated && !options_.find_unused_parameters) unused.push_back(&parameter);
  }
  if (!unused.empty()) fail_unused(unused);
  std::vector<torch::Tensor> gradients;
  for (Parameter& parameter : parameters_) {
    const torch::Tensor& gradient = parameter.tensor.grad();
    if (gradient.defined() && gradient.layout() != torch::kStrided) {
      fail(format_text("the gradient of {} is sparse, which is not supported; make its embedding with sparse(false)",
                       parameter.name));
    }
    gradients.push_back(VirtualSums::taken_from(parameter.tensor));
    parameter.kept = parameter.kept || parameter.accumulated;
    parameter.accumulated = false;
  }
  tree_->keep(std::move(gradients));
}

void Reducer::drop_kept() noexcept {
  tree_->clear();
  for (Parameter& parameter : parameters_) parameter.kept = parameter.accumulated = false;
}

}  // namespace maniple::detail
