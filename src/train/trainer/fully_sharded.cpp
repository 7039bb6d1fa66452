// FullySharded: the whole model is one unit, and the program's loss function is the unit's forward.
#include "comm/base/check.h"
#include "train/fully_sharded/unit.h"
#include "train/tensor/public_call.h"
#include "train/trainer/strategy.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

using detail::FullyShardedBase;

/// The unit of a module of unknown class.
struct ShardedRoot final : FullyShardedBase {
  ShardedRoot(std::shared_ptr<torch::nn::Module> module, FullyShardOptions options)
      : FullyShardedBase(std::move(module), std::move(options)) {}
};

std::vector<detail::ShardUnit*> units_in(torch::nn::Module& module) {
  std::vector<detail::ShardUnit*> units;
  for (const auto& one : module.modules()) {
    if (const auto* base = dynamic_cast<const FullyShardedBase*>(one.get())) units.push_back(base->unit().get());
  }
  return units;
}

class FullyShardedStrategy final : public TrainerStrategy {
 public:
  FullyShardedStrategy(Given given, std::shared_ptr<ProcessGroup> world, const FullyShardOptions& options)
      : TrainerStrategy(std::move(given), std::move(world)),
        is_unit_(dynamic_cast<FullyShardedBase*>(given_.model.module.get()) != nullptr) {
    drop_gradients();
    root_ = is_unit_ ? std::dynamic_pointer_cast<FullyShardedBase>(given_.model.module)
                     : std::make_shared<ShardedRoot>(given_.model.module, options);
  }

  bool divides_model() const override { return true; }
  ProcessGroup* forward_group() const override { return world().get(); }
  torch::nn::Module& module() override { return root_ ? *root_ : *given_.model.module; }

  torch::Tensor loss_of(const detail::TrainerBatch& batch, Metrics& metrics) override {
    if (is_unit_) return TrainerStrategy::loss_of(batch, metrics);
    detail::UnitForward forward(root_->unit());
    detail::TrainerBatch replaced = batch;
    if (batch.data.defined() && forward.changes_inputs()) replaced.data = forward.inputs({batch.data}).front();
    return forward.finish({TrainerStrategy::loss_of(replaced, metrics)}).front();
  }

  void finish_backward() override { broadcast_from_first(root_->buffers()); }

  std::string nonfinite_in(const detail::TrainerBatch& batch) override {
    drop_gradients();
    const auto unsynced = root_->no_sync();  // keeps the whole gradients of this rank's batch
    Metrics unused;
    const torch::Tensor loss = loss_of(batch, unused);
    loss.backward();
    std::string text = trainer::nonfinite_loss(loss);
    const std::string name = first_nonfinite_parameter();
    if (!name.empty()) trainer::add_nonfinite_gradient(text, name);
    for (detail::ShardUnit* unit : units_in(*root_)) unit->forget_gradients();
    drop_gradients();
    return text;
  }

 private:
  std::string first_nonfinite_parameter() {
    std::unordered_map<const c10::TensorImpl*, torch::Tensor> whole_gradients;
    for (const detail::ShardUnit* unit : units_in(*root_)) {
      for (const detail::ShardedParameter& one : unit->parameters())
        whole_gradients[one.parameter.unsafeGetTensorImpl()] = one.accumulated;
    }
    for (const auto& entry : root_->named_parameters()) {
      const torch::Tensor gradient = whole_gradients[entry.value().unsafeGetTensorImpl()];
      if (gradient.defined() && !torch::isfinite(gradient).all().item<bool>()) return entry.key();
    }
    return {};
  }
  void broadcast_from_first(const std::vector<torch::Tensor>& tensors) const {
    trainer::broadcast_from_first(tensors, world());
  }

  bool is_unit_;  ///< the module is a unit itself, so its own forward gathers
  std::shared_ptr<FullyShardedBase> root_;
};

}  // namespace

std::unique_ptr<TrainerStrategy> trainer::make(const strategy::FullySharded& choice, TrainerStrategy::Given given) {
  torch::nn::Module& module = *given.model.module;
  for (const auto& entry : module.named_parameters()) {
    const TensorLayout layout = layout_of(entry.value());
    MANIPLE_REQUIRE(
        !layout.divided() || layout.kind == LayoutKind::fully_sharded,
        "Trainer: parameter {} is {}, and strategy FullySharded divides whole parameters; write .strategy = "
        "maniple::strategy::TensorParallel{}",
        entry.key(), layout.text(), "{}");
  }
  FullyShardOptions options = choice.shard;
  const std::vector<detail::ShardUnit*> units = units_in(module);
  for (const detail::ShardUnit* unit : units) {
    if (!options.group) {
      options.group = unit->options().group;
      options.replicate_group = unit->options().replicate_group;
    }
    MANIPLE_REQUIRE(
        unit->options().group == options.group,
        "Trainer: {} divides its parameters over group {}, and strategy FullySharded over group {}; leave the "
        "strategy's group unset",
        unit->text(), unit->options().group->name(), options.group->name());
  }
  options.group = group_or_default(options.group);
  if (!options.group) return std::make_unique<TrainerStrategy>(std::move(given), nullptr);
  const bool is_unit = dynamic_cast<FullyShardedBase*>(&module) != nullptr;
  if (!is_unit) {
    require_fresh("FullySharded", given.optimizer);
    // The root's backward begins right after its forward, so resharding in between would be wasted.
    if (!options.reshard_after_forward) options.reshard_after_forward = false;
  }
  const auto world = world_of("FullySharded", choice.world, options.group, options.replicate_group);
  return std::make_unique<FullyShardedStrategy>(std::move(given), world, options);
}

}  // namespace maniple
