// ShardedOptimizer: an optimizer whose state is divided over the ranks of a group (ZeRO stage 1).
//
//   maniple::DistributedDataParallel<Net> ddp(net);
//   maniple::ShardedOptimizer<maniple::optim::AdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(3e-4));
//   ...
//   loss.backward();                         // averaged by DistributedDataParallel: whole on every rank, as ever
//   optimizer.step();                        // every rank steps its part of the parameters, then all have all of them
//
// What it saves   AdamW keeps two numbers for each parameter; of n ranks each keeps 1/n of them, and computes 1/n of
//                 the step. Parameters and gradients stay whole.
// Same bits       The parameters are those that the plain optimizer would give, bit for bit, with the optimizers of
//                 optim.h: all they do is done element by element. Those of torch::optim that work so can be divided as
//                 well: SGD, Adam, AdamW, RMSprop, Adagrad.
// How it divides  The elements of all parameters in a row are cut into parts of equally many bytes of state, at
// multiples of 64 bytes: a
//                 parameter may have parts on several ranks, and a rank may have none of a small model. Parameters that
//                 are dense but not contiguous (channels-last) are not cut.
// Parameters move The constructor copies the parameters into memory of its own, where all of one dtype stand in a row,
// with rank 0's
//                 values on all ranks, and lets the tensors point there: gathering the parts needs no further copy.
//                 Views that were taken before still see the old memory. What moves parameters afterwards (module.to(),
//                 torch::load, set_data) is found by the next step, which throws.
// As ever         It is a torch::optim::Optimizer: parameter groups, zero_grad, closures, schedulers, clip_grad_norm_,
//                 GradScaler, Accumulation, Trainer and Checkpoint take it. Options are those of param_groups(); a
//                 parameter without a gradient is left alone. A rank that has run out of batches (uneven_inputs.h)
//                 calls step() in its shadow_step.
// Checkpoints     Checkpoint writes the whole state as the plain optimizer's: rank 0 gathers it, and any number of
//                 ranks loads it, or the plain optimizer; the reverse, too. shards() is for checkpoints of which each
//                 rank writes a part. torch::save throws Unsupported.
//
// shared_parameters: on each host the parameters of all ranks are the same memory. Each rank steps its part where all
// see it, and a barrier is all that is communicated: no all_gather, and one copy of the weights for each host. Between
// hosts one rank of each exchanges the parts. CPU, backend native. The price is that ranks are no longer independent of
// each other:
//   - step() begins with a barrier, so that nobody still reads parameters in its backward when others change them, and
//     ends with one. Whatever else reads them (an evaluation in another thread) keeps out of step().
//   - What changes parameters by other means changes them for all ranks of the host: p.mul_(0.5) on each of four ranks
//     makes a sixteenth. Do so on one rank of each host, between two barriers. Loading a checkpoint on all ranks is
//     fine: all write the same.
//   - A rank that dies in step() leaves a step that is half done in memory that the others see: go on from a
//     checkpoint.
//   - They stay shared when the optimizer is gone; unshare() gives each rank a copy of its own. A child of fork()
//     shares them as well.
//
// All ranks make the same calls. The constructor compares parameters and options of all ranks, step() learning rates
// and which parameters have a gradient; a difference is an InvalidArgument on all ranks, and nothing is changed. One
// thread at a time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/error.h>
#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/optim.h>
#include <maniple/train/shard.h>

namespace MANIPLE_API maniple {

struct ShardingOptions {
  /// Whose ranks divide the state: those that hold the same parameters, which is the group of DistributedDataParallel.
  /// Null: the default group.
  std::shared_ptr<ProcessGroup> group = nullptr;
  /// One copy of the parameters for each host: see above. The same on all ranks.
  bool shared_parameters = false;
};

/// What ShardedOptimizer is for every kind of optimizer.
class ShardedOptimizerBase : public torch::optim::Optimizer {
 public:
  ~ShardedOptimizerBase() override;

  /// Collective. Returns when the parameters of all ranks have been updated.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Collective. (Optimizer's own does as well: the next step finds what is new.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  /// For who changed 16-bit parameters between steps: see optim.h.
  void reset_master_weights();

  /// This rank's parts of the state: every tensor of it, under the name that Checkpoint gives it
  /// ("group.0.parameter.3.exp_avg"). Only of parameters that have been stepped. A part that is all of a parameter has
  /// its shape, and its strides: reshape({-1}) of it are the elements in order. Local.
  std::vector<ShardOf> shards();
  /// The rest of the state, which is no tensors: options of all groups, and numbers of steps of the parameters that
  /// have parts here. Local.
  std::map<std::string, std::string> state_texts();
  /// Makes the state anew, as described by the texts of all ranks together and the names of all tensors, with tensors
  /// that hold zeros, and returns this rank's parts, to be filled. Throws InvalidArgument for what does not fit. Local.
  std::vector<ShardOf> begin_load(const std::map<std::string, std::string>& texts,
                                  const std::set<std::string>& tensors);

  /// Bytes of state on this rank, float32 copies of parameters included.
  std::size_t state_bytes();
  const std::shared_ptr<ProcessGroup>& group() const noexcept;
  bool shares_parameters() const noexcept;
  /// Ends shared_parameters: every rank gets parameters of its own, with the values they have now. This optimizer makes
  /// no more steps. Collective.
  void unshare();

  void save(torch::serialize::OutputArchive& archive) const override;  ///< throws Unsupported: use Checkpoint
  void load(torch::serialize::InputArchive& archive) override;         ///< throws Unsupported: use Checkpoint

  struct Impl;
  Impl& impl() noexcept { return *impl_; }  ///< internal

 protected:
  /// Makes the optimizer of this rank's parts.
  using MakeLocal =
      std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::optim::OptimizerParamGroup> groups)>;
  ShardedOptimizerBase(std::vector<torch::optim::OptimizerParamGroup> groups,
                       std::unique_ptr<torch::optim::OptimizerOptions> defaults, ShardingOptions sharding,
                       optim::StepOptions step_options, MakeLocal make);

 private:
  std::unique_ptr<Impl> impl_;
};

namespace detail {

/// The options of a kind of optimizer.
template <class T>
constexpr auto options_of() {
  if constexpr (std::is_base_of_v<torch::optim::SGD, T>) {
    return std::type_identity<torch::optim::SGDOptions>();
  } else if constexpr (std::is_base_of_v<torch::optim::Adam, T>) {
    return std::type_identity<torch::optim::AdamOptions>();
  } else if constexpr (std::is_base_of_v<torch::optim::AdamW, T>) {
    return std::type_identity<torch::optim::AdamWOptions>();
  } else if constexpr (std::is_base_of_v<torch::optim::RMSprop, T>) {
    return std::type_identity<torch::optim::RMSpropOptions>();
  } else if constexpr (std::is_base_of_v<torch::optim::Adagrad, T>) {
    return std::type_identity<torch::optim::AdagradOptions>();
  } else {
    static_assert(
        std::is_base_of_v<optim::Lion, T>,
        "ShardedOptimizer divides SGD, Adam, AdamW, Lion, RMSprop and Adagrad, which work element by element");
    return std::type_identity<optim::LionOptions>();
  }
}

}  // namespace detail

template <class T>
class ShardedOptimizer : public ShardedOptimizerBase {
 public:
  using Options = typename decltype(detail::options_of<T>())::type;

  /// Collective over the group: all ranks pass parameters of the same shapes, and the same options. Throws
  /// InvalidArgument for parameters that share memory with each other, and for step_options with an optimizer of
  /// torch::optim; Unsupported for shared_parameters where ranks of a host share no memory.
  explicit ShardedOptimizer(std::vector<torch::Tensor> parameters, Options defaults, ShardingOptions sharding = {},
                            optim::StepOptions step_options = {})
      : ShardedOptimizer(
            std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(std::move(parameters))},
            std::move(defaults), std::move(sharding), step_options) {}
  explicit ShardedOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, Options defaults,
                            ShardingOptions sharding = {}, optim::StepOptions step_options = {})
      : ShardedOptimizerBase(std::move(groups), std::make_unique<Options>(defaults), std::move(sharding), step_options,
                             [defaults, step_options](std::vector<torch::optim::OptimizerParamGroup> local)
                                 -> std::unique_ptr<torch::optim::Optimizer> {
                               if constexpr (std::is_base_of_v<optim::MasterWeights, T>) {
                                 return std::make_unique<T>(std::move(local), defaults, step_options);
                               } else {
                                 if (step_options.master_weights || step_options.maximize)
                                   throw InvalidArgument(
                                       "ShardedOptimizer: StepOptions are for the optimizers of maniple::optim, this "
                                       "is one of torch::optim");
                                 return std::make_unique<T>(std::move(local), defaults);
                               }
                             }) {}
};

}  // namespace maniple
