// FullySharded: the whole model is one unit, and the program's loss function is the unit's forward.
#include <algorithm>

#include "comm/base/check.h"
#include "train/fully_sharded/unit.h"
#include "train/tensor/public_call.h"
#include "train/tensor_layout.h"
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

bool is_divided_over(const TensorLayout& layout, const ProcessGroup& group) {
  return std::any_of(layout.divided_over.begin(), layout.divided_over.end(),
                     [&](const auto& one) { return detail::same_ranks(*one, group); });
}

/// Throws InvalidArgument unless each parameter is whole, or divided by the strategy's groups alone.
void require_divided_over(torch::nn::Module& module, const ProcessGroup* tensor_group) {
  for (const auto& entry : module.named_parameters()) {
    const TensorLayout layout = layout_of(entry.value());
    MANIPLE_REQUIRE(layout.kind != LayoutKind::pipeline_stage,
                    "Trainer: parameter {} is {}, and strategy FullySharded divides whole parameters; write .strategy "
                    "= maniple::strategy::Pipeline{} and the undivided Sequential",
                    entry.key(), layout.text(), "{}");
    // fully_shard adds its group at the end.
    const std::size_t layers = layout.divided_over.size() - (layout.kind == LayoutKind::fully_sharded ? 1 : 0);
    for (std::size_t i = 0; i < layers; ++i) {
      const ProcessGroup& group = *layout.divided_over[i];
      if (group.size() == 1 || (tensor_group != nullptr && detail::same_ranks(group, *tensor_group))) continue;
      throw InvalidArgument(format_text(
          "Trainer: parameter {} is {}, and strategy FullySharded {}; set its tensor_group to the group of these "
          "layers, or write .strategy = maniple::strategy::TensorParallel{}",
          entry.key(), layout.text(),
          tensor_group == nullptr
              ? std::string("divides whole parameters")
              : format_text("has tensor_group {} of {} ranks", tensor_group->name(), tensor_group->size()),
          "{}"));
    }
  }
}

class FullyShardedStrategy final : public TrainerStrategy {
 public:
  FullyShardedStrategy(Given given, std::shared_ptr<ProcessGroup> world, const FullyShardOptions& options,
                       std::shared_ptr<ProcessGroup> tensor_group)
      : TrainerStrategy(std::move(given), std::move(world)),
        tensor_group_(std::move(tensor_group)),
        is_unit_(dynamic_cast<FullyShardedBase*>(given_.model.module.get()) != nullptr) {
    drop_gradients();
    if (tensor_group_) trainer::broadcast_from_first(replicated_over_tensor_group(), tensor_group_);
    root_ = is_unit_ ? std::dynamic_pointer_cast<FullyShardedBase>(given_.model.module)
                     : std::make_shared<ShardedRoot>(given_.model.module, options);
  }

  int data_ranks() const override { return ranks() / (tensor_group_ ? tensor_group_->size() : 1); }
  bool reports() const override { return !tensor_group_ || tensor_group_->rank() == 0; }
  ProcessGroup* same_batches() const override { return tensor_group_.get(); }
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
  /// Buffers, and the parameters (or this rank's rows of them) that all ranks of the group hold.
  std::vector<torch::Tensor> replicated_over_tensor_group() const {
    std::vector<torch::Tensor> tensors = given_.model.module->buffers();
    for (const torch::Tensor& parameter : given_.model.module->parameters()) {
      if (parameter.numel() > 0 && !is_divided_over(layout_of(parameter), *tensor_group_)) tensors.push_back(parameter);
    }
    return tensors;
  }
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

  std::shared_ptr<ProcessGroup> tensor_group_;  ///< null: no tensor-parallel layers
  bool is_unit_;                                ///< the module is a unit itself, so its own forward gathers
  std::shared_ptr<FullyShardedBase> root_;
};

}  // namespace

std::unique_ptr<TrainerStrategy> trainer::make(const strategy::FullySharded& choice, TrainerStrategy::Given given) {
  torch::nn::Module& module = *given.model.module;
  if (choice.tensor_group) choice.tensor_group->require_member("Trainer: strategy FullySharded: tensor_group");
  const auto tensor_group = choice.tensor_group && choice.tensor_group->size() > 1 ? choice.tensor_group : nullptr;
  require_divided_over(module, tensor_group.get());
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
  MANIPLE_REQUIRE(options.group || !tensor_group,
                  "Trainer: strategy FullySharded has tensor_group {}, but neither shard.group nor a default group; "
                  "set shard.group to the ranks that divide the parameters",
                  tensor_group->name());
  if (!options.group) return std::make_unique<TrainerStrategy>(std::move(given), nullptr);
  const bool is_unit = dynamic_cast<FullyShardedBase*>(&module) != nullptr;
  if (!is_unit) {
    require_fresh("FullySharded", given.optimizer);
    // The root's backward begins right after its forward, so resharding in between would be wasted.
    if (!options.reshard_after_forward) options.reshard_after_forward = false;
  }
  for (const auto& group : {options.group, options.replicate_group}) {
    MANIPLE_REQUIRE(!tensor_group || !group || detail::shared_ranks(*group, *tensor_group) == 1,
                    "Trainer: strategy FullySharded: group {} of {} ranks and tensor_group {} have several ranks in "
                    "common; set shard.group and tensor_group to different dimensions of a mesh",
                    group->name(), group->size(), tensor_group->name());
  }
  if (tensor_group && !units.empty()) {
    const auto ranks = tensor_group->all_gather_objects(std::to_string(options.group->rank()), {}, public_place());
    MANIPLE_REQUIRE(std::ranges::all_of(ranks, [&](const std::string& rank) { return rank == ranks.front(); }),
                    "Trainer: strategy FullySharded: the ranks of tensor_group {} hold different rows of the units, as "
                    "they are ranks {} of their shard groups; set shard.group and tensor_group to dimensions of a mesh",
                    tensor_group->name(), joined(ranks, ", "));
  }
  const auto world = world_of("FullySharded", choice.world, {options.group, options.replicate_group, tensor_group});
  return std::make_unique<FullyShardedStrategy>(std::move(given), world, options, tensor_group);
}

}  // namespace maniple
