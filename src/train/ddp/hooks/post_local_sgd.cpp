// Averages gradients over all ranks at first, and over few or none later. Cost: the all_reduce, if there is one.
#include "comm/base/check.h"
#include "train/ddp/hooks/hook_parts.h"
#include "train/tensor/public_call.h"
#include "train/tensor_layout.h"
#include <maniple/dist.h>
#include <maniple/train/post_local_sgd.h>

namespace maniple {

PostLocalSGDState::PostLocalSGDState(PostLocalSGDOptions options) : options_(std::move(options)) {
  MANIPLE_REQUIRE(options_.start_localSGD_iter >= 0,
                  "PostLocalSGDState: start_localSGD_iter is {}; it must not be negative",
                  options_.start_localSGD_iter);
  if (options_.subgroup) options_.subgroup->require_member("PostLocalSGDState");
}

void PostLocalSGDState::set_iteration(std::int64_t iteration) {
  MANIPLE_REQUIRE(iteration >= 0, "PostLocalSGDState: an iteration of {}; it must not be negative", iteration);
  iteration_ = iteration;
}

CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state) {
  MANIPLE_REQUIRE(state != nullptr, "post_localSGD_hook: the state is null");
  return [state = std::move(state)](GradBucket& bucket, CommContext& comm) {
    const PostLocalSGDOptions& options = state->options_;
    const bool together = state->iteration_ < options.start_localSGD_iter;
    if (bucket.is_last()) ++state->iteration_;
    const std::uint64_t bytes = bucket.buffer().nbytes();
    count_plain(state->traffic_, bytes, comm.group()->size());
    if (!together && (!options.post_local_gradient_allreduce || !options.subgroup)) return Work();
    const CommContext over(together ? comm.group() : options.subgroup, comm.async());
    count_all_reduce(state->traffic_, bytes, over.group()->size());
    return over.all_reduce(bucket.buffer(), ReduceOp::avg);
  };
}

PostLocalSGDOptimizer::PostLocalSGDOptimizer(torch::optim::Optimizer& optimizer, PeriodicModelAverager averager)
    : optimizer_(optimizer), averager_(std::move(averager)) {}

void PostLocalSGDOptimizer::step() {
  optimizer_.step();
  std::vector<torch::Tensor> parameters;
  for (const auto& group : optimizer_.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  averager_.average_parameters(parameters);
}

void PostLocalSGDOptimizer::zero_grad() { optimizer_.zero_grad(); }

// ---- PeriodicModelAverager ------------------------------------------------------------------------------------------

PeriodicModelAverager::PeriodicModelAverager(PeriodicModelAveragerOptions options) : options_(std::move(options)) {
  MANIPLE_REQUIRE(options_.period >= 1, "PeriodicModelAverager: a period of {}; it must be at least 1",
                  options_.period);
  MANIPLE_REQUIRE(options_.warmup_steps >= 0, "PeriodicModelAverager: warmup_steps is {}; it must not be negative",
                  options_.warmup_steps);
  if (!options_.group) options_.group = get_default_group();
  options_.group->require_member("PeriodicModelAverager");
}

void PeriodicModelAverager::set_step(std::int64_t step) {
  MANIPLE_REQUIRE(step >= 0, "PeriodicModelAverager: a step of {}; it must not be negative", step);
  step_ = step;
}

bool PeriodicModelAverager::average_parameters(const std::vector<torch::Tensor>& parameters) {
  const std::int64_t since = step_++ - options_.warmup_steps;
  if (since < 0 || since % options_.period != 0) return false;
  const PublicCall call("PeriodicModelAverager::average_parameters, which all ranks call");
  for (std::size_t i = 0; i < parameters.size(); ++i)
    detail::require_replicated_over(*options_.group, std::to_string(i), parameters[i], "PeriodicModelAverager",
                                    "fully_shard keeps replicas equal by itself");
  if (!parameters.empty()) all_reduce_coalesced(parameters, ReduceOp::avg, {.group = options_.group}, public_place());
  return true;
}

}  // namespace maniple
