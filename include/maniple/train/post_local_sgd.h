// Post-local SGD (Lin, Stich, Patel, Jaggi 2020): first ranks train in step, then on their own, with their parameters
// averaged now and then.
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
// Up to start_localSGD_iter gradients are averaged over all ranks; from then on over the subgroup only, or not at all.
// The averager's warmup_steps is normally the same number.
//
// DistributedDataParallel still copies rank 0's buffers to all ranks in each synchronised backward: with batch norm,
// construct it with broadcast_buffers = false where that is too much. The optimizer's own state is not averaged. Not
// with Average::samples, whose weights count over all ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/comm_hooks.h>

namespace MANIPLE_API maniple {

/// Averaging the parameters themselves, now and then.
///
///   maniple::PeriodicModelAverager averager({.period = 4, .warmup_steps = 100});
///   ...
///   optimizer.step();
///   averager.average_parameters(net->parameters());     // every fourth step it communicates
struct PeriodicModelAveragerOptions {
  std::int64_t period = 1;        ///< steps from one average to the next; at least 1
  std::int64_t warmup_steps = 0;  ///< so many calls do nothing
  /// Null: the default group.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

class PeriodicModelAverager {
 public:
  explicit PeriodicModelAverager(PeriodicModelAveragerOptions options);

  /// To be called after each step. In the calls number warmup_steps, warmup_steps + period, ... (the first is number 0)
  /// every parameter becomes its average over the ranks; all ranks get the same bits. True if it was so. Collective in
  /// those calls.
  bool average_parameters(const std::vector<torch::Tensor>& parameters);

  /// Calls so far: for checkpoints. The same on all ranks.
  std::int64_t step() const noexcept { return step_; }
  void set_step(std::int64_t step);

  const PeriodicModelAveragerOptions& options() const noexcept { return options_; }

 private:
  PeriodicModelAveragerOptions options_;
  std::int64_t step_ = 0;
};

struct PostLocalSGDOptions {
  /// Over which gradients are averaged later: this rank is in it. Null: not averaged any more.
  std::shared_ptr<ProcessGroup> subgroup = nullptr;
  /// So many synchronised backwards are averaged over all ranks.
  std::int64_t start_localSGD_iter = 0;
  /// False: gradients are not averaged later, even if there is a subgroup.
  bool post_local_gradient_allreduce = true;
};

class PostLocalSGDState {
 public:
  explicit PostLocalSGDState(PostLocalSGDOptions options);  ///< throws InvalidArgument naming the option

  const PostLocalSGDOptions& options() const noexcept { return options_; }
  std::int64_t iteration() const noexcept { return iteration_; }  ///< synchronised backwards so far
  void set_iteration(std::int64_t iteration);                     ///< after loading a checkpoint
  HookTraffic traffic() const noexcept { return traffic_; }

 private:
  friend CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);
  PostLocalSGDOptions options_;
  std::int64_t iteration_ = 0;
  HookTraffic traffic_;
};

CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);

/// An optimizer whose parameters are averaged after its step, every so many steps.
class PostLocalSGDOptimizer {
 public:
  /// `optimizer` must outlive this object.
  PostLocalSGDOptimizer(torch::optim::Optimizer& optimizer, PeriodicModelAverager averager);

  void step();       ///< collective in the steps in which the averager averages
  void zero_grad();  ///< the optimizer's own

  torch::optim::Optimizer& optimizer() noexcept { return optimizer_; }
  PeriodicModelAverager& averager() noexcept { return averager_; }

 private:
  torch::optim::Optimizer& optimizer_;
  PeriodicModelAverager averager_;
};

}  // namespace maniple
