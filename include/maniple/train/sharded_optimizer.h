// An optimizer whose state is divided over the ranks of a group (ZeRO stage 1).
//
//   maniple::DistributedDataParallel<Net> ddp(net);
//   maniple::ShardedOptimizer<maniple::optim::AdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(3e-4));
//   ...
//   loss.backward();                         // averaged by DistributedDataParallel: full gradients on every rank
//   optimizer.step();                        // every rank steps its part; then all ranks have all parameters
//
// Savings         AdamW keeps two numbers for each parameter. With n ranks each rank keeps 1/n of them and computes 1/n
//                 of the step. Parameters and gradients stay whole.
// Same bits       With the optimizers of optim.h the parameters are bit for bit the same as with the plain optimizer,
//                 because these optimizers work element by element. SGD, Adam, AdamW, RMSprop and Adagrad of
//                 torch::optim do so, too, and can be divided as well.
// Division        The elements of all parameters, in a row, are cut into parts with equal bytes of state, at multiples
//                 of 64 bytes. A parameter may have parts on several ranks, and with a small model a rank may have
//                 none. Parameters that are dense but not contiguous (channels-last) are not cut.
// New memory      The constructor moves the parameters into memory of the optimizer, contiguous for each dtype and with
//                 rank 0's values on all ranks, and points the tensors there, so gathering the parts needs no further
//                 copy. Views taken before still refer to the old memory. If parameters are moved afterwards
//                 (module.to(), torch::load, set_data), the next step detects it and throws.
// Usage           It is a torch::optim::Optimizer: parameter groups, zero_grad, closures, schedulers, clip_grad_norm_,
//                 GradScaler, Accumulation, Trainer and Checkpoint work with it. Options are read from param_groups().
//                 A parameter without a gradient is not stepped. A rank that has run out of batches (uneven_inputs.h)
//                 calls step() in its shadow_step.
// Checkpoints     Checkpoint saves the state in the plain optimizer's format: rank 0 gathers and writes it. Any number
//                 of ranks loads it, and so does the plain optimizer; the reverse works, too. shards() is for
//                 checkpoints in which each rank writes its part. torch::save throws Unsupported.
//
// shared_parameters: the ranks of a host share one copy of the parameters. Each rank steps its part in the shared
// memory. Within a host only a barrier is communicated: no all_gather. Between hosts, one rank of each host exchanges
// the parts. CPU and native backend only. In exchange, ranks are no longer independent:
// - step() begins with a barrier, so that no rank still reads parameters in backward while others change them, and ends
//   with one. Other readers (an evaluation in another thread) must not run during step().
// - Changing parameters by other means changes them for all ranks of the host: p.mul_(0.5) on each of four ranks
//   multiplies by 1/16. Change them on one rank of each host, between two barriers. Loading a checkpoint on all ranks
//   is safe: all ranks write the same values.
// - A rank that dies in step() leaves a half-finished step in memory that the other ranks see: continue from a
//   checkpoint.
// - Parameters stay shared after the optimizer is destroyed; unshare() gives each rank its own copy. A child of fork()
//   shares them as well.
//
// Contract. All ranks make the same calls. The constructor compares parameters and options across the ranks; step()
// compares learning rates and which parameters have a gradient. A difference throws InvalidArgument on all ranks and
// changes nothing. One thread at a time.
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
#include <maniple/train/shard_of.h>

namespace MANIPLE_API maniple {

struct ShardingOptions {
  /// The ranks that divide the state. They hold the same parameters: use the group of DistributedDataParallel. Null:
  /// the default group.
  std::shared_ptr<ProcessGroup> group = nullptr;
  /// One copy of the parameters per host: see above. The same on all ranks.
  bool shared_parameters = false;
};

/// The part of ShardedOptimizer that does not depend on the kind of optimizer.
class ShardedOptimizerBase : public torch::optim::Optimizer {
 public:
  ~ShardedOptimizerBase() override;

  /// Collective. Returns when the parameters of all ranks have been updated.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Collective. (Optimizer::add_param_group works as well: the next step detects the new parameters.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  /// Call it after changing 16-bit parameters between steps: see optim.h.
  void reset_master_weights();

  /// This rank's parts of the state: each of its tensors, under the name used by Checkpoint
  /// ("group.0.parameter.3.exp_avg"). Only parameters that have been stepped have state. A part that covers a whole
  /// parameter has its shape and strides: reshape({-1}) gives the elements in order. Local.
  std::vector<ShardOf> shards();
  /// The rest of the state, which is not in tensors: options of all groups, and step counts of the parameters with
  /// parts on this rank. Local.
  std::map<std::string, std::string> state_texts();
  /// Re-creates the state, with zeros, from the merged texts of all ranks and the names of all tensors, and returns
  /// this rank's parts for the caller to fill. Throws InvalidArgument if texts or names do not fit. Local.
  std::vector<ShardOf> begin_load(const std::map<std::string, std::string>& texts,
                                  const std::set<std::string>& tensors);

  /// Bytes of state on this rank, including float32 copies of parameters.
  std::size_t state_bytes();
  const std::shared_ptr<ProcessGroup>& group() const noexcept;
  bool shares_parameters() const noexcept;
  /// Ends shared_parameters: every rank receives its own parameters with the current values. This optimizer cannot step
  /// afterwards. Collective.
  void unshare();

  void save(torch::serialize::OutputArchive& archive) const override;  ///< throws Unsupported: use Checkpoint
  void load(torch::serialize::InputArchive& archive) override;         ///< throws Unsupported: use Checkpoint

  struct Impl;
  Impl& impl() noexcept { return *impl_; }  ///< internal

 protected:
  /// Makes the optimizer for this rank's parts.
  using MakeLocal =
      std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::optim::OptimizerParamGroup> groups)>;
  ShardedOptimizerBase(std::vector<torch::optim::OptimizerParamGroup> groups,
                       std::unique_ptr<torch::optim::OptimizerOptions> defaults, ShardingOptions sharding,
                       optim::StepOptions step_options, MakeLocal make);

 private:
  std::unique_ptr<Impl> impl_;
};

namespace detail {

/// The options class of optimizer class T.
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
  /// InvalidArgument if parameters share memory with each other, or if step_options are given for an optimizer of
  /// torch::optim. Throws Unsupported for shared_parameters if ranks of a host cannot share memory.
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
