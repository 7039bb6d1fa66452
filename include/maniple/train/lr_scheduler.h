// Learning-rate schedules: warm-up, cosine, one-cycle, steps, plateau, and what they make together.
//
//   maniple::optim::AdamW optimizer(net->parameters(), 3e-4);
//   auto warm_up = maniple::lr::linear({.start_factor = 0.01, .steps = 500});
//   auto decay = maniple::lr::cosine({.steps = 9500, .minimum = 3e-5});
//   maniple::LrScheduler scheduler(optimizer, maniple::lr::sequential({warm_up, decay}, {500}));
//   checkpoint.add("scheduler", scheduler);
//   for (...) {
//     ...
//     optimizer.step();
//     scheduler.step();                                   // once a step; or once an epoch, if the numbers mean epochs
//   }
//
// A schedule is a function of the number of steps and of a group's base learning rate, which is what its options hold
// when the scheduler is made. So the value depends on the number of steps alone, not on what was rounded before, and
// any step can be asked for. The formulas are those of torch.optim.lr_scheduler. All kinds of optimizers; every
// parameter group has a base rate of its own.
//
// In checkpoints: Checkpoint::add takes schedulers. They are saved as the number of steps and the base rates; the
// schedule itself is the program's.
//
// On several ranks every rank has its own scheduler and makes the same calls; nothing is communicated. For
// PlateauScheduler that means the same metric on all ranks: average it first (Metrics::all_reduce), or ranks decide
// differently and their parameters part.
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

/// The learning rate after `step` steps of a group whose base rate is `base`; for one-cycle the momentum, too.
struct LrSchedule {
  std::function<double(std::int64_t step, double base)> rate;
  std::function<double(std::int64_t step)> momentum = nullptr;  ///< null: it is left alone
};

/// The schedules. Each throws InvalidArgument for numbers that make no sense.
namespace lr {

struct LinearOptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1;
  std::int64_t steps = 5;
};
/// Warm-up: the base rate times a factor that goes from start_factor to end_factor in so many steps, and stays.
/// LinearLR.
LrSchedule linear(LinearOptions options);

/// The base rate times `factor` for so many steps, then the base rate. ConstantLR.
LrSchedule constant(double factor, std::int64_t steps);

struct CosineOptions {
  std::int64_t steps = 0;  ///< from the base rate down to the minimum
  double minimum = 0;
};
/// Half a cosine; steps after the last go up again, as in PyTorch. CosineAnnealingLR.
LrSchedule cosine(CosineOptions options);

struct CosineRestartsOptions {
  std::int64_t steps = 0;   ///< of the first period
  std::int64_t growth = 1;  ///< each period is so many times as long as the one before
  double minimum = 0;
};
/// Half a cosine again and again. CosineAnnealingWarmRestarts.
LrSchedule cosine_restarts(CosineRestartsOptions options);

enum class Anneal : std::uint8_t { cosine, linear };
struct OneCycleOptions {
  double max_lr = 0;  ///< of all groups; the base rates are not used
  std::int64_t steps = 0;
  double rise = 0.3;  ///< the part of the steps in which the rate grows; PyTorch: pct_start
  Anneal anneal = Anneal::cosine;
  bool cycle_momentum =
      true;  ///< momentum of SGD, beta1 of Adam, AdamW and Lion: it falls while the rate grows, and the reverse
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double divide_start = 25;   ///< begins at max_lr / divide_start
  double divide_end = 1e4;    ///< ends at the rate of the beginning / divide_end
  bool three_phases = false;  ///< down to the rate of the beginning as fast as up, then to the end
};
/// Up, and down to nearly nothing. After the last step the rate stays (PyTorch throws). OneCycleLR.
LrSchedule one_cycle(OneCycleOptions options);

/// Times gamma after every `size` steps. StepLR.
LrSchedule step(std::int64_t size, double gamma = 0.1);
/// Times gamma at each of these steps, which ascend. MultiStepLR.
LrSchedule multi_step(std::vector<std::int64_t> milestones, double gamma = 0.1);
/// Times gamma in every step. ExponentialLR.
LrSchedule exponential(double gamma);
/// The base rate times (1 - step / steps)^power; zero after that. PolynomialLR.
LrSchedule polynomial(std::int64_t steps, double power = 1);
/// The base rate times what the function says. LambdaLR.
LrSchedule lambda(std::function<double(std::int64_t step)> factor);

/// The first until milestones[0], then the second as from its own step 0, and so on: one milestone less than schedules.
/// SequentialLR.
LrSchedule sequential(std::vector<LrSchedule> schedules, std::vector<std::int64_t> milestones);
/// The base rate times the factors of all. ChainedScheduler; the same for schedules that are factors, which all are but
/// one_cycle and cosine with a minimum above 0 (whose factor is then that of the base rate).
LrSchedule chained(std::vector<LrSchedule> schedules);

}  // namespace lr

/// Applies a schedule to an optimizer, which must outlive it. The rate of step 0 is set here and now.
class LrScheduler {
 public:
  LrScheduler(torch::optim::Optimizer& optimizer, LrSchedule schedule);
  /// One for each parameter group.
  LrScheduler(torch::optim::Optimizer& optimizer, std::vector<LrSchedule> schedules);
  /// Several optimizers, such as those of apply_optimizer_in_backward.
  LrScheduler(std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers, LrSchedule schedule);

  void step() { set_steps(steps_ + 1); }
  std::int64_t steps() const noexcept { return steps_; }
  /// As after so many calls of step().
  void set_steps(std::int64_t steps);
  /// What the groups have now, those of all optimizers in a row.
  std::vector<double> lrs() const;

  std::string state_dict() const;                  ///< the number of steps and the base rates, exactly
  void load_state_dict(const std::string& saved);  ///< and sets the rates of that step

 private:
  std::vector<std::shared_ptr<torch::optim::Optimizer>> owned_;
  std::vector<torch::optim::Optimizer*> optimizers_;
  std::vector<LrSchedule> schedules_;  // one for each group, or one for all
  std::vector<double> base_;
  std::int64_t steps_ = 0;
};

struct PlateauOptions {
  StopMode mode = StopMode::min;  ///< whether a smaller metric is better (a loss) or a larger one (an accuracy)
  double factor = 0.1;            ///< the rate is multiplied by it
  int patience = 10;              ///< when the metric has not been better for more than so many steps
  double threshold = 1e-4;
  bool relative = true;  ///< better means by more than threshold * best; false: than threshold
  int cooldown = 0;      ///< steps after a reduction that do not count
  double min_lr = 0;
  double eps = 1e-8;  ///< smaller changes are not made
};

/// Lowers the rate when a metric does not get better. ReduceLROnPlateau. The decision depends on the metric alone: give
/// all ranks the same.
class PlateauScheduler {
 public:
  explicit PlateauScheduler(torch::optim::Optimizer& optimizer, PlateauOptions options = {});

  /// True if the rate was lowered. NaN is never better.
  bool step(double metric);
  double best() const noexcept { return best_; }
  int bad_steps() const noexcept { return bad_; }

  std::string state_dict() const;
  void load_state_dict(const std::string& saved);  ///< rates are the optimizer's, and saved with it

 private:
  torch::optim::Optimizer* optimizer_;
  PlateauOptions options_;
  double best_;
  int bad_ = 0;
  int cooldown_ = 0;
};

}  // namespace maniple
