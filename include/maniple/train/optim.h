// Optimizers that step all parameters in one pass: SGD, Adam, AdamW and Lion.
//
//   maniple::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(3e-4).weight_decay(0.1));
//   ...
//   loss.backward();
//   optimizer.step();
//
// Speed           torch::optim runs about ten operations for each parameter. These optimizers read and write parameter,
//                 gradient and state once per step: on the CPU in Maniple's own loops over all tensors, on GPUs with
//                 LibTorch's fused kernels or tensor lists (_foreach_). `maniple bench optim` measures both in one run.
// Compatibility   SGD, Adam and AdamW derive from torch::optim's classes and replace step(). Options, parameter groups,
//                 state, torch::save, Checkpoint, schedulers and closures work unchanged, and checkpoints can be
//                 exchanged. Parameters without a gradient are not stepped.
// Exactness       The formulas are torch::optim's, in the same order. Results differ by the rounding of single
//                 operations, because nothing is fused to a * b + c here. float16 and bfloat16 are computed in float32
//                 and rounded once per step; torch::optim rounds after every operation. On the CPU the bits do not
//                 depend on the processor or the number of threads.
// GPUs            The host never waits: step counts are kept on the host.
// Threads         A step of more than half a million elements uses up to at::get_num_threads() threads.
//
// Gradients are dense; a sparse one throws InvalidArgument before anything is changed. Any strides are accepted; a
// gradient or a state with a memory layout other than its parameter's is copied first.
//
// master_weights: parameters in float16 or bfloat16 lose small updates, because at 1.0 the nearest other bfloat16
// number is 0.4 % away. With this option the optimizer keeps a float32 copy of each parameter, and its state in
// float32. It steps the copies and rounds the result into the parameters. The copies are made from the parameters in
// the first step. Checkpoint and torch::save include them; torch::optim's own classes load such a file without the
// copies. After changing parameters between steps, call reset_master_weights(); otherwise the next step undoes the
// change.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {
namespace optim {

/// Options that torch::optim's option classes lack.
struct StepOptions {
  bool master_weights = false;  ///< float32 copies of float16 and bfloat16 parameters: see above
  bool maximize = false;        ///< maximize the objective: step along the gradient
};

/// Base of these optimizers: the step and the float32 copies of parameters.
class MasterWeights {
 public:
  explicit MasterWeights(StepOptions options) : step_options_(options) {}
  virtual ~MasterWeights() = default;

  const StepOptions& step_options() const noexcept { return step_options_; }
  /// The float32 copy of a parameter; undefined if there is none (yet).
  torch::Tensor master_weight(const torch::Tensor& parameter) const;
  void set_master_weight(const torch::Tensor& parameter, torch::Tensor copy);
  /// Discards all copies: the next step makes them again from the parameters.
  void reset_master_weights() noexcept { copies_.clear(); }

 private:
  StepOptions step_options_;
  std::unordered_map<const void*, torch::Tensor> copies_;
};

/// momentum, dampening, nesterov, weight_decay (added to the gradient).
class SGD : public torch::optim::SGD, public MasterWeights {
 public:
  explicit SGD(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::SGDOptions defaults,
               StepOptions options = {});
  explicit SGD(std::vector<torch::Tensor> parameters, torch::optim::SGDOptions defaults, StepOptions options = {});
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

/// betas, eps, amsgrad, weight_decay (added to the gradient).
class Adam : public torch::optim::Adam, public MasterWeights {
 public:
  explicit Adam(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::AdamOptions defaults = {},
                StepOptions options = {});
  explicit Adam(std::vector<torch::Tensor> parameters, torch::optim::AdamOptions defaults = {},
                StepOptions options = {});
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

/// Adam with weight decay applied to the parameters themselves.
class AdamW : public torch::optim::AdamW, public MasterWeights {
 public:
  explicit AdamW(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::AdamWOptions defaults = {},
                 StepOptions options = {});
  explicit AdamW(std::vector<torch::Tensor> parameters, torch::optim::AdamWOptions defaults = {},
                 StepOptions options = {});
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

struct LionOptions : public torch::optim::OptimizerCloneableOptions<LionOptions> {
  LionOptions(double lr = 1e-4) : lr_(lr) {}  // NOLINT: converts on purpose, like torch::optim's options
  TORCH_ARG(double, lr) = 1e-4;
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  TORCH_ARG(double, weight_decay) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { lr_ = lr; }
};

struct LionParamState : public torch::optim::OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(torch::Tensor, exp_avg);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Lion (Chen et al., 2023): every element moves by lr in the direction of the sign of beta1 * m + (1 - beta1) * g;
/// then m becomes beta2 * m + (1 - beta2) * g. Half of Adam's state. Typical settings: a third to a tenth of AdamW's
/// lr, and weight decay larger by the same factor. Weight decay works as in AdamW.
class Lion : public torch::optim::Optimizer, public MasterWeights {
 public:
  explicit Lion(std::vector<torch::optim::OptimizerParamGroup> groups, LionOptions defaults = {},
                StepOptions options = {});
  explicit Lion(std::vector<torch::Tensor> parameters, LionOptions defaults = {}, StepOptions options = {});
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

/// An optimizer as named tensors, with the names of Python's optimizer.state_dict(): "state.0.exp_avg", "state.0.step"
/// (one float32), "param_groups.0.lr" (one float64), "param_groups.0.betas" (two), "param_groups.0.params" (int64:
/// indices of its parameters, numbered across all groups). The tensors are the optimizer's own, not copies. Takes every
/// optimizer that Checkpoint takes.
std::map<std::string, torch::Tensor> state_dict(torch::optim::Optimizer& optimizer);

/// The reverse. Options missing from the dict keep their values; unknown options (foreach, fused, ...) are ignored.
/// Throws InvalidArgument, which names the mismatch: another number of groups or parameters, or a state of another
/// shape.
void load_state_dict(torch::optim::Optimizer& optimizer, const std::map<std::string, torch::Tensor>& dict);

}  // namespace optim
}  // namespace maniple
