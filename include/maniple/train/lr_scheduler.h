// Learning-rate schedules: warm-up, cosine, one-cycle, steps, plateau, and combinations.
//
//   maniple::optim::AdamW optimizer(net->parameters(), 3e-4);
//   auto warm_up = maniple::lr::linear({.start_factor = 0.01, .steps = 500});
//   auto decay = maniple::lr::cosine({.steps = 9500, .minimum = 3e-5});
//   maniple::LrScheduler scheduler(optimizer, maniple::lr::sequential({warm_up, decay}, {500}));
//   checkpoint.add("scheduler", scheduler);
//   for (...) {
//     ...
//     optimizer.step();
//     scheduler.step();                                   // per step, or per epoch if the numbers count epochs
//   }
//
// A schedule is a function of the step number and of a parameter group's base learning rate, which is the rate in the
// group's options when the scheduler is made. The value depends on the step number alone, so rounding errors do not
// accumulate, and any step can be evaluated. The formulas are the same as in torch.optim.lr_scheduler. Schedules work
// with all optimizers; every parameter group has its own base rate.
//
// Checkpoints. Checkpoint::add takes schedulers. It saves the step number and the base rates; the program supplies the
// schedule itself.
//
// Several ranks. Every rank has its own scheduler and makes the same calls; nothing is communicated. PlateauScheduler
// needs the same metric on all ranks: average it first (Metrics::all_reduce), otherwise ranks decide differently and
// their parameters diverge.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/export.h>
#include <maniple/train/stop.h>

namespace MANIPLE_API maniple {

/// The learning rate after `step` steps for a group with base rate `base`; for one-cycle also the momentum.
struct LrSchedule {
  std::function<double(std::int64_t step, double base)> rate;
  std::function<double(std::int64_t step)> momentum = nullptr;  ///< null: the momentum stays unchanged
};

/// The schedules. Each throws InvalidArgument for numbers out of range.
namespace lr {

struct LinearOptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1;
  std::int64_t steps = 5;
};
/// Warm-up: multiplies the base rate by a factor that goes linearly from start_factor to end_factor in `steps` steps
/// and then stays. LinearLR.
LrSchedule linear(LinearOptions options);

/// Multiplies the base rate by `factor` for `steps` steps; then the base rate. ConstantLR.
LrSchedule constant(double factor, std::int64_t steps);

struct CosineOptions {
  std::int64_t steps = 0;  ///< from the base rate down to the minimum
  double minimum = 0;
};
/// Half a cosine. After the last step the rate rises again, as in PyTorch. CosineAnnealingLR.
LrSchedule cosine(CosineOptions options);

struct CosineRestartsOptions {
  std::int64_t steps = 0;   ///< length of the first period
  std::int64_t growth = 1;  ///< ratio of the lengths of successive periods
  double minimum = 0;
};
/// Repeated half cosines. CosineAnnealingWarmRestarts.
LrSchedule cosine_restarts(CosineRestartsOptions options);

enum class Anneal : std::uint8_t { cosine, linear };
struct OneCycleOptions {
  double max_lr = 0;  ///< for all groups; base rates are not used
  std::int64_t steps = 0;
  double rise = 0.3;  ///< fraction of the steps in which the rate grows; PyTorch: pct_start
  Anneal anneal = Anneal::cosine;
  bool cycle_momentum =
      true;  ///< cycles momentum (SGD) or beta1 (Adam, AdamW, Lion): it falls while the rate grows, and vice versa
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double divide_start = 25;   ///< the initial rate is max_lr / divide_start
  double divide_end = 1e4;    ///< the final rate is the initial rate / divide_end
  bool three_phases = false;  ///< falls to the initial rate as fast as it rose, then to the final rate
};
/// Rises, then falls to nearly zero. After the last step the rate stays (PyTorch throws). OneCycleLR.
LrSchedule one_cycle(OneCycleOptions options);

/// Multiplies by gamma after every `size` steps. StepLR.
LrSchedule step(std::int64_t size, double gamma = 0.1);
/// Multiplies by gamma at each milestone. Milestones are in ascending order. MultiStepLR.
LrSchedule multi_step(std::vector<std::int64_t> milestones, double gamma = 0.1);
/// Multiplies by gamma in every step. ExponentialLR.
LrSchedule exponential(double gamma);
/// The base rate times (1 - step / steps)^power; zero after that. PolynomialLR.
LrSchedule polynomial(std::int64_t steps, double power = 1);
/// The base rate times factor(step). LambdaLR.
LrSchedule lambda(std::function<double(std::int64_t step)> factor);

/// Runs the first schedule until milestones[0], then the second from its own step 0, and so on. There is one milestone
/// fewer than schedules. SequentialLR.
LrSchedule sequential(std::vector<LrSchedule> schedules, std::vector<std::int64_t> milestones);
/// The base rate times the factors of all schedules. Like ChainedScheduler for schedules that are factors: all but
/// one_cycle, and cosine with a minimum above 0 (whose factor is then relative to the base rate).
LrSchedule chained(std::vector<LrSchedule> schedules);

}  // namespace lr

/// Applies a schedule to an optimizer, which must outlive it. The constructor sets the rate of step 0.
class LrScheduler {
 public:
  LrScheduler(torch::optim::Optimizer& optimizer, LrSchedule schedule);
  /// One schedule per parameter group.
  LrScheduler(torch::optim::Optimizer& optimizer, std::vector<LrSchedule> schedules);
  /// For several optimizers, such as those made by apply_optimizer_in_backward.
  LrScheduler(std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers, LrSchedule schedule);

  void step() { set_steps(steps_ + 1); }
  std::int64_t steps() const noexcept { return steps_; }
  /// Sets the state to that after `steps` calls of step().
  void set_steps(std::int64_t steps);
  /// The current rates of the groups of all optimizers, in order.
  std::vector<double> lrs() const;

  std::string state_dict() const;                  ///< the exact step number and base rates
  void load_state_dict(const std::string& saved);  ///< also sets the rates of that step

 private:
  std::vector<std::shared_ptr<torch::optim::Optimizer>> owned_;
  std::vector<torch::optim::Optimizer*> optimizers_;
  std::vector<LrSchedule> schedules_;  // one per group, or one for all
  std::vector<double> base_;
  std::int64_t steps_ = 0;
};

struct PlateauOptions {
  StopMode mode = StopMode::min;  ///< min: a smaller metric is better (a loss); max: a larger one (an accuracy)
  double factor = 0.1;            ///< factor by which the rate is multiplied
  int patience = 10;              ///< steps without improvement that are tolerated; one more reduces the rate
  double threshold = 1e-4;
  bool relative = true;  ///< an improvement must exceed threshold * best; false: threshold
  int cooldown = 0;      ///< steps after a reduction that are ignored
  double min_lr = 0;
  double eps = 1e-8;  ///< smaller changes of the rate are not made
};

/// Lowers the rate when a metric stops improving. ReduceLROnPlateau. The decision depends on the metric alone: pass the
/// same metric on all ranks.
class PlateauScheduler {
 public:
  explicit PlateauScheduler(torch::optim::Optimizer& optimizer, PlateauOptions options = {});

  /// Returns true if the rate was lowered. NaN never counts as an improvement.
  bool step(double metric);
  double best() const noexcept { return best_; }
  int bad_steps() const noexcept { return bad_; }

  std::string state_dict() const;
  void load_state_dict(const std::string& saved);  ///< does not set rates; they are saved with the optimizer

 private:
  torch::optim::Optimizer* optimizer_;
  PlateauOptions options_;
  double best_;
  int bad_ = 0;
  int cooldown_ = 0;
};

}  // namespace maniple
