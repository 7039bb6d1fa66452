// Averaging the parameters themselves, now and then.
//
//   maniple::PeriodicModelAverager averager({.period = 4, .warmup_steps = 100});
//   ...
//   optimizer.step();
//   averager.average_parameters(net->parameters());     // every fourth step it communicates
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>

namespace maniple {

struct PeriodicModelAveragerOptions {
  std::int64_t period = 1;        ///< steps from one average to the next; at least 1
  std::int64_t warmup_steps = 0;  ///< so many calls do nothing
  /// Null: the default group.
  std::shared_ptr<ProcessGroup> process_group = nullptr;
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

}  // namespace maniple
