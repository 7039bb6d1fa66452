// Optimizers that take their step over all parameters together: SGD, Adam, AdamW and Lion.
//
//   maniple::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(3e-4).weight_decay(0.1));
//   ...
//   loss.backward();
//   optimizer.step();
//
// What differs    torch::optim runs about ten operations for each parameter. Here one pass reads parameter, gradient
//                 and state once and writes them once: on the CPU by loops of our own over all tensors together, on
//                 GPUs by LibTorch's fused kernels or its lists of tensors (_foreach_). `maniple bench optim` measures
//                 both in one run.
// What does not   SGD, Adam and AdamW are torch::optim's classes with another step(): options, parameter groups, state,
//                 torch::save, Checkpoint and schedulers stay as they are, and a checkpoint of one loads into the
//                 other. So do closures, and parameters without a gradient are left alone.
// Exactness       The formulas are torch::optim's, in the same order; results differ by the rounding of single
//                 operations, as nothing is fused to a * b + c here. float16 and bfloat16 are computed in float32 and
//                 rounded once in a step, where torch::optim rounds after every operation. On the CPU bits do not
//                 depend on processor or number of threads.
// GPUs            The host never waits: numbers of steps are kept on the host.
// Threads         A step of more than half a million elements uses up to at::get_num_threads() threads.
//
// Gradients are dense; a sparse one throws InvalidArgument before anything is changed. Any strides will do; a gradient
// or a state that does not lie in memory as its parameter does is copied first.
//
// master_weights: parameters in float16 or bfloat16 lose small updates: at 1.0 bfloat16 has no number nearer than 0.4
// %. With this option the optimizer keeps a float32 copy of each, and its state in float32, steps those, and rounds the
// result into the parameter. The copies are made from the parameters in the first step; Checkpoint and torch::save keep
// them, and torch::optim's own classes load such a file, without the copies. Who changes parameters between steps calls
// reset_master_weights(), or the next step undoes the change.
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

/// What torch::optim's options have no room for.
struct StepOptions {
  bool master_weights = false;  ///< float32 copies of float16 and bfloat16 parameters: see above
  bool maximize = false;        ///< the objective is to grow: steps go along the gradient
};

/// A part of each of these optimizers: how it steps, and its float32 copies of parameters.
class MasterWeights {
 public:
  explicit MasterWeights(StepOptions options) : step_options_(options) {}
  virtual ~MasterWeights() = default;

  const StepOptions& step_options() const noexcept { return step_options_; }
  /// The copy of a parameter; undefined where there is none (yet).
  torch::Tensor master_weight(const torch::Tensor& parameter) const;
  void set_master_weight(const torch::Tensor& parameter, torch::Tensor copy);
  /// Forgets all copies: the next step makes them anew from the parameters.
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

/// The same with weight decay of the parameters themselves.
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
  LionOptions(double lr = 1e-4) : lr_(lr) {}  // NOLINT: converts on purpose, as torch::optim's do
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

/// Lion (Chen et al., 2023): every element moves by lr, in the direction of the sign of beta1 * m + (1 - beta1) * g;
/// then m becomes beta2 * m + (1 - beta2) * g. Half of Adam's state. Usual: a third to a tenth of AdamW's lr, and so
/// much more weight decay, which is that of AdamW.
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
/// (one float32), "param_groups.0.lr" (one float64), "param_groups.0.betas" (two), "param_groups.0.params" (int64: the
/// numbers of its parameters, which count through all groups). Tensors are those of the optimizer, not copies. Any
/// optimizer that Checkpoint takes.
std::map<std::string, torch::Tensor> state_dict(torch::optim::Optimizer& optimizer);

/// The reverse. Options that the dict does not have keep their values, those that are unknown here are left out
/// (foreach, fused, ...). Throws InvalidArgument naming what does not fit: another number of groups or parameters, a
/// state of another shape.
void load_state_dict(torch::optim::Optimizer& optimizer, const std::map<std::string, torch::Tensor>& dict);

}  // namespace optim
}  // namespace maniple
