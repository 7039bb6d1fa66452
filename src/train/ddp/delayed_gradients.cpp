#include "train/ddp/delayed_gradients.h"

#include <utility>

#include "comm/base/check.h"

namespace maniple {

DelayedGradients::DelayedGradients(const DdpOptions& options, std::vector<Parameter>& parameters,
                                   std::vector<Bucket>& buckets)
    : parameters_(parameters), buckets_(buckets) {
  const auto index_of = [&](const std::string& name, const char* option) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].name == name) return i;
    }
    throw InvalidArgument(
        format_text("DistributedDataParallel: {} names \"{}\", but the module has no parameter of that name that "
                    "requires a gradient; take the names of named_parameters()",
                    option, name));
  };
  for (const std::string& name : options.delay_all_reduce_named_params) {
    Parameter& parameter = parameters[index_of(name, "delay_all_reduce_named_params")];
    parameter.delayed = true;
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].delayed) delayed_.push_back(i);
  }
  MANIPLE_REQUIRE(
      delayed_.size() < parameters.size(),
      "DistributedDataParallel: delay_all_reduce_named_params names every parameter; leave at least one out, "
      "whose gradient marks the beginning of a backward");
  const std::string& trigger = options.param_to_hook_all_reduce;
  if (trigger.empty()) return;
  MANIPLE_REQUIRE(
      !delayed_.empty(),
      "DistributedDataParallel: param_to_hook_all_reduce is {}, but delay_all_reduce_named_params is empty: "
      "there is nothing to delay",
      trigger);
  trigger_ = index_of(trigger, "param_to_hook_all_reduce");
  MANIPLE_REQUIRE(!parameters[trigger_].delayed,
                  "DistributedDataParallel: param_to_hook_all_reduce is {}, which is itself in "
                  "delay_all_reduce_named_params; choose one whose gradient is computed after the delayed ones",
                  trigger);
}

void DelayedGradients::begin_backward() {
  for (const std::size_t i : delayed_) {
    Parameter::Gradient& gradient = parameters_[i].gradient;
    if (gradient == Parameter::Gradient::early) gradient = Parameter::Gradient::ready;
  }
}

std::string DelayedGradients::ready(const Parameter& parameter, int rank) {
  if (buckets_.empty()) return {};
  Bucket& bucket = buckets_[parameter.bucket];
  if (bucket.launched) {
    return format_text(
        "parameter {}, whose all_reduce is delayed, got a gradient on rank {} after parameter {}, which was to be "
        "the last; choose another param_to_hook_all_reduce, or none",
        parameter.name, rank, parameters_[trigger_].name);
  }
  if (bucket.pending == 0) bucket.copy_in(parameter.place);
  return {};
}

bool DelayedGradients::release() {
  for (const std::size_t i : delayed_) {
    if (!parameters_[i].ready() && parameters_[i].expected) return false;
  }
  for (const std::size_t i : delayed_) {
    Bucket& bucket = buckets_[parameters_[i].bucket];
    bucket.pending = 0;
    if (parameters_[i].ready()) bucket.copy_in(parameters_[i].place);
  }
  return true;
}

}  // namespace maniple
