// Post-local SGD (Lin, Stich, Patel, Jaggi 2020): ranks first average gradients in every step, then train locally and
// average their parameters periodically.
//
//   auto group = maniple::get_default_group();
//   auto near = group->split(group->topology().node_rank());          // the ranks of this host
//   ddp.register_comm_hook(maniple::post_localSGD_hook(
//       std::make_shared<maniple::PostLocalSGDState>(maniple::PostLocalSGDOptions{.subgroup = near,
//                                                                                 .start_localSGD_iter = 100})));
//   torch::optim::SGD local(net->parameters(), 0.1);
//   maniple::PeriodicModelAverager averager({.period = 4, .warmup_steps = 100});
//   maniple::PostLocalSGDOptimizer optimizer(local, averager);
//   for (...) { optimizer.zero_grad(); ...backward(); optimizer.step(); }
//
// Gradients are averaged over all ranks in the first start_localSGD_iter backwards, and after that only over the
// subgroup, or not at all. The averager's warmup_steps is normally the same number.
//
// DistributedDataParallel still copies rank 0's buffers to all ranks in each synchronised backward. For models with
// batch norm, set broadcast_buffers = false to avoid this. The optimizer's own state is not averaged. Cannot be
// combined with Average::samples, whose weights refer to all ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/comm_hooks.h>

namespace MANIPLE_API maniple {

/// Averages the parameters themselves, periodically.
///
///   maniple::PeriodicModelAverager averager({.period = 4, .warmup_steps = 100});
///   ...
///   optimizer.step();
///   averager.average_parameters(net->parameters());     // communicates in every fourth step
struct PeriodicModelAveragerOptions {
  std::int64_t period = 1;        ///< steps between averages; at least 1
  std::int64_t warmup_steps = 0;  ///< number of initial calls that do nothing
  /// Null: the default group.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

class PeriodicModelAverager {
 public:
  explicit PeriodicModelAverager(PeriodicModelAveragerOptions options);

  /// Call it after each step. In calls number warmup_steps, warmup_steps + period, ... (the first call is number 0)
  /// every parameter becomes its average over the ranks; all ranks get the same bits. Returns true if it averaged.
  /// Collective in these calls.
  bool average_parameters(const std::vector<torch::Tensor>& parameters);

  /// Number of calls so far, for checkpoints. The same on all ranks.
  std::int64_t step() const noexcept { return step_; }
  void set_step(std::int64_t step);

  const PeriodicModelAveragerOptions& options() const noexcept { return options_; }

 private:
  PeriodicModelAveragerOptions options_;
  std::int64_t step_ = 0;
};

struct PostLocalSGDOptions {
  /// The ranks, including this one, that average gradients later. Null: gradients are no longer averaged.
  std::shared_ptr<ProcessGroup> subgroup = nullptr;
  /// Number of synchronised backwards that are averaged over all ranks.
  std::int64_t start_localSGD_iter = 0;
  /// False: gradients are not averaged later, even with a subgroup.
  bool post_local_gradient_allreduce = true;
};

class PostLocalSGDState {
 public:
  explicit PostLocalSGDState(PostLocalSGDOptions options);  ///< throws InvalidArgument, which names the option

  const PostLocalSGDOptions& options() const noexcept { return options_; }
  std::int64_t iteration() const noexcept { return iteration_; }  ///< synchronised backwards so far
  void set_iteration(std::int64_t iteration);                     ///< call it after loading a checkpoint
  HookTraffic traffic() const noexcept { return traffic_; }

 private:
  friend CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);
  PostLocalSGDOptions options_;
  std::int64_t iteration_ = 0;
  HookTraffic traffic_;
};

CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);

/// Steps an optimizer, then averages the parameters periodically.
class PostLocalSGDOptimizer {
 public:
  /// `optimizer` must outlive this object.
  PostLocalSGDOptimizer(torch::optim::Optimizer& optimizer, PeriodicModelAverager averager);

  void step();       ///< collective in the steps that average
  void zero_grad();  ///< the optimizer's own

  torch::optim::Optimizer& optimizer() noexcept { return optimizer_; }
  PeriodicModelAverager& averager() noexcept { return averager_; }

 private:
  torch::optim::Optimizer& optimizer_;
  PeriodicModelAverager averager_;
};

}  // namespace maniple
