// TensorParallel: the layers communicate by themselves. The strategy averages over the data group and counts each
// sample once.
#include "comm/base/check.h"
#include "train/tensor_layout.h"
#include "train/trainer/strategy.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

class TensorParallelStrategy final : public TrainerStrategy {
 public:
  TensorParallelStrategy(Given given, std::shared_ptr<ProcessGroup> world, std::shared_ptr<ProcessGroup> group,
                         std::shared_ptr<ProcessGroup> data_group, const DdpOptions& ddp)
      : TrainerStrategy(std::move(given), std::move(world), std::move(data_group), ddp), group_(std::move(group)) {
    std::vector<torch::Tensor> replicated = module().buffers();
    for (const torch::Tensor& parameter : module().parameters()) {
      if (!layout_of(parameter).divided()) replicated.push_back(parameter);
    }
    trainer::broadcast_from_first(replicated, group_);
  }

  int data_ranks() const override { return ranks() / group_->size(); }
  bool reports() const override { return group_->rank() == 0; }
  bool divides_model() const override { return true; }
  ProcessGroup* same_batches() const override { return group_.get(); }

 private:
  std::shared_ptr<ProcessGroup> group_;
};

}  // namespace

std::unique_ptr<TrainerStrategy> trainer::make(const strategy::TensorParallel& choice, TrainerStrategy::Given given) {
  MANIPLE_REQUIRE(choice.ddp.group == nullptr,
                  "Trainer: strategy TensorParallel: its ddp.group is set; set data_group instead");
  const DividedParameter divided = first_divided(*given.model.module);
  const auto group = group_or_default(choice.group);
  MANIPLE_REQUIRE(group || divided.name.empty(),
                  "Trainer: parameter {} is {}, and strategy TensorParallel has no group; set its `group`",
                  divided.name, divided.layout.text());
  if (!group) return std::make_unique<TrainerStrategy>(std::move(given), nullptr);
  group->require_member("Trainer: strategy TensorParallel");
  MANIPLE_REQUIRE(
      group->size() == 1 || !divided.name.empty(),
      "Trainer: strategy TensorParallel over {} ranks, but {} has no tensor-parallel layer (tensor_parallel.h); every "
      "rank would do the same work. For different batches on all ranks write .strategy = "
      "maniple::strategy::DataParallel{}",
      group->size(), given.model.module->name(), "{}");
  for (const auto& entry : given.model.module->named_parameters()) {
    const TensorLayout layout = layout_of(entry.value());
    if (!layout.divided()) continue;
    const bool fits = layout.kind == LayoutKind::tensor_parallel && layout.divided_over.size() == 1 &&
                      layout.divided_over.front()->size() == group->size() &&
                      detail::shared_ranks(*layout.divided_over.front(), *group) == group->size();
    MANIPLE_REQUIRE(fits,
                    "Trainer: parameter {} is {}, and strategy TensorParallel is over group {} of {} ranks; make the "
                    "layers and the strategy with the same group",
                    entry.key(), layout.text(), group->name(), group->size());
  }
  const bool averages = choice.data_group && choice.data_group->size() > 1;
  const auto data_group = averages ? choice.data_group : nullptr;
  const auto world = world_of("TensorParallel", choice.world, {group, data_group});
  return std::make_unique<TensorParallelStrategy>(std::move(given), world, group, data_group, choice.ddp);
}

}  // namespace maniple
