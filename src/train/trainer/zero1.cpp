// Zero1: the program's optimizer holds the options; a ShardedOptimizer over the same parameters steps.
#include <typeinfo>

#include "comm/base/check.h"
#include "train/tensor/public_call.h"
#include "train/tensor_layout.h"
#include "train/trainer/strategy.h"
#include <maniple/train/optim.h>
#include <maniple/train/sharded_optimizer.h>

namespace maniple {
namespace {

/// Null if the optimizer is not exactly a T.
template <class T>
std::unique_ptr<ShardedOptimizerBase> sharded_as(torch::optim::Optimizer& optimizer, const ShardingOptions& sharding) {
  if (typeid(optimizer) != typeid(T)) return nullptr;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& group : optimizer.param_groups())
    groups.emplace_back(detail::distinct(group.params()), group.options().clone());
  using Options = typename ShardedOptimizer<T>::Options;
  const auto& defaults = static_cast<const Options&>(optimizer.defaults());
  optim::StepOptions step_options;
  if (const auto* one = dynamic_cast<const optim::MasterWeights*>(&optimizer)) step_options = one->step_options();
  return std::make_unique<ShardedOptimizer<T>>(std::move(groups), defaults, sharding, step_options);
}

template <class... Kinds>
std::unique_ptr<ShardedOptimizerBase> sharded_as_one_of(torch::optim::Optimizer& optimizer,
                                                        const ShardingOptions& sharding) {
  std::unique_ptr<ShardedOptimizerBase> made;
  ((made = sharded_as<Kinds>(optimizer, sharding)) || ...);
  return made;
}

std::unique_ptr<ShardedOptimizerBase> sharded_from(torch::optim::Optimizer& optimizer,
                                                   const ShardingOptions& sharding) {
  return sharded_as_one_of<torch::optim::SGD, torch::optim::Adam, torch::optim::AdamW, torch::optim::RMSprop,
                           torch::optim::Adagrad, optim::SGD, optim::Adam, optim::AdamW, optim::Lion>(optimizer,
                                                                                                      sharding);
}

template <class... Kinds>
bool is_one_of(const torch::optim::Optimizer& optimizer) {
  return ((typeid(optimizer) == typeid(Kinds)) || ...);
}

class Zero1Strategy final : public TrainerStrategy {
 public:
  Zero1Strategy(Given given, const std::shared_ptr<ProcessGroup>& group, const strategy::Zero1& choice)
      : TrainerStrategy(std::move(given), group, group, choice.ddp),
        // After DistributedDataParallel: the sharded optimizer moves the parameters to other memory, with the values
        // that all ranks have by now.
        sharded_(sharded_from(given_.optimizer, {.group = group, .shared_parameters = choice.shared_parameters})) {}

  torch::optim::Optimizer& optimizer() override { return *sharded_; }
  void take_options() override { copy_options(given_.optimizer, *sharded_); }
  void give_options() override { copy_options(*sharded_, given_.optimizer); }

 private:
  static void copy_options(torch::optim::Optimizer& from, torch::optim::Optimizer& to) {
    MANIPLE_REQUIRE(from.param_groups().size() == to.param_groups().size(),
                    "Trainer: the optimizer has {} parameter groups, and had {} when the Trainer was made; add groups "
                    "before",
                    from.param_groups().size(), to.param_groups().size());
    for (std::size_t i = 0; i < from.param_groups().size(); ++i)
      to.param_groups()[i].set_options(from.param_groups()[i].options().clone());
  }

  std::unique_ptr<ShardedOptimizerBase> sharded_;
};

}  // namespace

std::unique_ptr<TrainerStrategy> trainer::make(const strategy::Zero1& choice, TrainerStrategy::Given given) {
  require_undivided("Zero1", *given.model.module);
  require_fresh("Zero1", given.optimizer);
  const auto& optimizer = given.optimizer;
  MANIPLE_REQUIRE(
      (is_one_of<torch::optim::SGD, torch::optim::Adam, torch::optim::AdamW, torch::optim::RMSprop,
                 torch::optim::Adagrad, optim::SGD, optim::Adam, optim::AdamW, optim::Lion>(optimizer)),
      "Trainer: strategy Zero1 cannot divide the state of {}; it takes SGD, Adam, AdamW, RMSprop and Adagrad of "
      "torch::optim, and SGD, Adam, AdamW and Lion of maniple::optim",
      c10::demangle(typeid(optimizer).name()));
  const auto group = group_or_default(choice.ddp.group);
  if (!group) return std::make_unique<TrainerStrategy>(std::move(given), nullptr);
  return std::make_unique<Zero1Strategy>(std::move(given), group, choice);
}

}  // namespace maniple
