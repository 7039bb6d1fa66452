#include <maniple/train/model_averager.h>

#include "base/check.h"
#include <maniple/dist.h>

namespace maniple {

PeriodicModelAverager::PeriodicModelAverager(PeriodicModelAveragerOptions options) : options_(std::move(options)) {
  MANIPLE_REQUIRE(options_.period >= 1, "PeriodicModelAverager: a period of {}; it must be at least 1",
                  options_.period);
  MANIPLE_REQUIRE(options_.warmup_steps >= 0, "PeriodicModelAverager: warmup_steps is {}; it must not be negative",
                  options_.warmup_steps);
  if (!options_.process_group) options_.process_group = get_default_group();
  options_.process_group->require_member("PeriodicModelAverager");
}

void PeriodicModelAverager::set_step(std::int64_t step) {
  MANIPLE_REQUIRE(step >= 0, "PeriodicModelAverager: a step of {}; it must not be negative", step);
  step_ = step;
}

bool PeriodicModelAverager::average_parameters(const std::vector<torch::Tensor>& parameters) {
  const std::int64_t since = step_++ - options_.warmup_steps;
  if (since < 0 || since % options_.period != 0) return false;
  if (!parameters.empty()) all_reduce_coalesced(parameters, ReduceOp::avg, {.group = options_.process_group});
  return true;
}

}  // namespace maniple
