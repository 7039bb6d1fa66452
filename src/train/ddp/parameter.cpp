#include "train/ddp/parameter.h"

#include <algorithm>

#include "base/check.h"

namespace maniple {

std::string Parameter::conversion() const {
  if (hook->is_attached() && tensor.scalar_type() == dtype && tensor.device().is_cpu()) return {};
  return format_text(
      "parameter {} was converted from {} to {} on {} after it was wrapped, which drops its hook: its gradients are no "
      "longer averaged; convert the module first and wrap it then",
      name, c10::toString(dtype), c10::toString(tensor.scalar_type()), tensor.device().str());
}

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerFactory& make, const Parameter& parameter) {
  auto optimizer = make(parameter.name, parameter.tensor);
  MANIPLE_REQUIRE(optimizer != nullptr, "DistributedDataParallel: no optimizer was made for parameter {}",
                  parameter.name);
  MANIPLE_REQUIRE(std::dynamic_pointer_cast<torch::optim::LBFGS>(optimizer) == nullptr,
                  "DistributedDataParallel: LBFGS evaluates the loss in its step, so it cannot be applied in backward; "
                  "call its step() after backward");
  std::size_t count = 0;
  for (const auto& group : optimizer->param_groups()) {
    for (const auto& one : group.params()) count += one.is_same(parameter.tensor) ? 1 : 2;
  }
  MANIPLE_REQUIRE(count == 1,
                  "DistributedDataParallel: the optimizer made for parameter {} must hold that parameter and no other",
                  parameter.name);
  return optimizer;
}

void exchange_used(ProcessGroup& group, std::span<Parameter> parameters, const std::vector<bool>& used_here) {
  std::vector<std::uint8_t> used(used_here.begin(), used_here.end());
  group.all_reduce(buffer_of(used), ReduceOp::max);
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].used = used[i] != 0;
}

std::string names_of(const std::vector<const Parameter*>& parameters) {
  constexpr std::size_t kMost = 10;
  std::string text;
  for (std::size_t i = 0; i < std::min(kMost, parameters.size()); ++i) {
    text += format_text("{}{}", i == 0 ? "" : ", ", parameters[i]->name);
  }
  if (parameters.size() > kMost) text += format_text(" and {} more", parameters.size() - kMost);
  return text;
}

}  // namespace maniple
