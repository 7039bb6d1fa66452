// The common part of all strategies, and DataParallel.
#include "train/trainer/strategy.h"

#include <cmath>
#include <utility>

#include "comm/base/check.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include "train/tensor_layout.h"
#include <maniple/dist.h>
#include <maniple/train/sharded_optimizer.h>

namespace maniple {

TrainerStrategy::TrainerStrategy(Given given, std::shared_ptr<ProcessGroup> world,
                                 std::shared_ptr<ProcessGroup> averaged_over, DdpOptions ddp)
    : given_(std::move(given)), world_(std::move(world)) {
  if (!averaged_over) return;
  ddp.group = std::move(averaged_over);
  ddp_ = std::make_unique<detail::DdpBase>(given_.model.module, std::move(ddp));
}
TrainerStrategy::~TrainerStrategy() = default;

std::unique_ptr<TrainerStrategy> TrainerStrategy::make(const TrainerOptions& options, Given given) {
  MANIPLE_REQUIRE(given.model.module, "Trainer: the model is null");
  if (options.virtual_ranks != 0) return trainer::make_over_virtual_ranks(options, std::move(given));
  return std::visit([&](const auto& one) { return trainer::make(one, std::move(given)); }, options.strategy);
}

void TrainerStrategy::require_usable(const detail::TrainerData& data) const {
  MANIPLE_REQUIRE(
      !data.has_criterion || given_.model.forward,
      "Trainer: criterion() needs a model whose forward maps one tensor to one tensor, and {} does not; give "
      "fit() and evaluate() a function loss(batch) that calls the model",
      given_.model.module->name());
}

void TrainerStrategy::require_same_batch(const detail::TrainerBatch& batch) const {
  ProcessGroup* const ranks = same_batches();
  if (ranks == nullptr || ranks->size() == 1) return;
  const torch::NoGradGuard no_grad;
  std::string mine;
  for (const torch::Tensor& tensor : batch.tensors()) {
    if (!tensor.defined()) continue;
    const bool is_number = !tensor.is_complex() && tensor.numel() > 0;
    mine += format_text("{} [{}] with the sum {}; ", c10::toString(tensor.scalar_type()), joined(tensor.sizes()),
                        is_number ? tensor.to(torch::kFloat64).nan_to_num().sum().item<double>() : 0);
  }
  const auto all = ranks->all_gather_objects(mine, {}, public_place());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    MANIPLE_REQUIRE(
        all[rank] == all[0],
        "Trainer: ranks 0 and {} of group {} compute on the same batches with this strategy, and have {} and "
        "{}; give all of them the same data: DistributedSampler(size, maniple::divide_data(strategy))",
        rank, ranks->name(), all[0], all[rank]);
  }
}

Accumulation TrainerStrategy::accumulation(int batches) {
  return ddp_ ? Accumulation(*ddp_, batches) : Accumulation(detail::distinct(module().parameters()), batches);
}

torch::Tensor TrainerStrategy::loss_of(const detail::TrainerBatch& batch, Metrics& metrics) {
  std::shared_ptr<void> scope = autocast();
  torch::Tensor loss =
      batch.criterion ? batch.criterion(given_.model.forward(batch.data), batch.target, metrics) : batch.loss(metrics);
  scope.reset();
  MANIPLE_REQUIRE(loss.defined() && loss.numel() == 1,
                  "Trainer: the loss function returned {}; expected a tensor of one element, the mean over the batch",
                  loss.defined() ? format_text("a tensor of shape [{}]", joined(loss.sizes())) : "no tensor");
  return loss;
}

torch::Tensor TrainerStrategy::backward(const detail::TrainerBatch& batch, Metrics& metrics, const Scaled& scaled) {
  const torch::Tensor loss = loss_of(batch, metrics);
  scaled(loss).backward();
  return loss.detach();
}

// Averaged gradients do not show which rank's values were not finite first, so this rank's batch is computed again
// without averaging.
std::string TrainerStrategy::nonfinite_in(const detail::TrainerBatch& batch) {
  drop_gradients();
  const auto unsynced = ddp_ ? std::make_unique<NoSync>(ddp_->reducer()) : nullptr;
  Metrics unused;
  const torch::Tensor loss = loss_of(batch, unused);
  loss.backward();
  std::string text = trainer::nonfinite_loss(loss);
  for (const auto& entry : module().named_parameters()) {
    const torch::Tensor& gradient = entry.value().grad();
    if (!gradient.defined() || torch::isfinite(gradient).all().item<bool>()) continue;
    trainer::add_nonfinite_gradient(text, entry.key());
    break;
  }
  drop_gradients();
  return text;
}

/// Drops the gradients of all parameters, including those that the optimizer lacks. Sets them to none rather than zero:
/// the optimizer then skips a parameter that a step does not use, before and after a restart.
void TrainerStrategy::drop_gradients() {
  zero_grad(given_.optimizer, true);
  for (torch::Tensor& parameter : module().parameters()) parameter.mutable_grad() = torch::Tensor();
}

namespace trainer {

std::unique_ptr<TrainerStrategy> make(const strategy::DataParallel& choice, TrainerStrategy::Given given) {
  require_undivided("DataParallel", *given.model.module);
  const auto group = group_or_default(choice.ddp.group);
  return std::make_unique<TrainerStrategy>(std::move(given), group, group, choice.ddp);
}

std::shared_ptr<ProcessGroup> group_or_default(const std::shared_ptr<ProcessGroup>& given) {
  if (given) return given;
  return is_initialized() ? get_default_group() : nullptr;
}

std::shared_ptr<ProcessGroup> world_of(const char* strategy, const std::shared_ptr<ProcessGroup>& world,
                                       const std::vector<std::shared_ptr<ProcessGroup>>& groups) {
  std::vector<int> sizes;
  int expected = 1;
  for (const auto& group : groups) {
    if (group) expected *= sizes.emplace_back(group->size());
  }
  if (world) {
    world->require_member("Trainer: world");
    MANIPLE_REQUIRE(world->size() == expected, "Trainer: strategy {} has a world of {} ranks over groups of {}",
                    strategy, world->size(), joined(sizes, " x "));
    return world;
  }
  if (expected == groups.front()->size()) return groups.front();
  MANIPLE_REQUIRE(
      is_initialized() && get_default_group()->size() == expected,
      "Trainer: strategy {} over groups of {} ranks: set its `world` to the group of all {} (mesh.group(), if "
      "they are dimensions of a mesh)",
      strategy, joined(sizes, " x "), expected);
  return get_default_group();
}

void require_fresh(const char* strategy, torch::optim::Optimizer& optimizer) {
  MANIPLE_REQUIRE(dynamic_cast<ShardedOptimizerBase*>(&optimizer) == nullptr,
                  "Trainer: strategy {} takes a plain optimizer, and this is a ShardedOptimizer", strategy);
  MANIPLE_REQUIRE(optimizer.state().empty(),
                  "Trainer: the optimizer has made steps already, and strategy {} divides its parameters; give the "
                  "Trainer a new optimizer, and load what it had from a checkpoint",
                  strategy);
}

void require_undivided(const char* strategy, torch::nn::Module& module) {
  const DividedParameter divided = first_divided(module);
  if (divided.name.empty()) return;
  const char* fits = divided.layout.kind == LayoutKind::fully_sharded     ? "FullySharded{}"
                     : divided.layout.kind == LayoutKind::tensor_parallel ? "TensorParallel{}"
                                                                          : "Pipeline{} and the undivided Sequential";
  throw InvalidArgument(
      format_text("Trainer: parameter {} is {}, and strategy {} needs the whole model on every rank; write .strategy = "
                  "maniple::strategy::{}",
                  divided.name, divided.layout.text(), strategy, fits));
}

void broadcast_from_first(const std::vector<torch::Tensor>& tensors, const std::shared_ptr<ProcessGroup>& group) {
  if (!group || group->size() == 1) return;
  const torch::NoGradGuard no_grad;
  for (const torch::Tensor& tensor : detail::distinct(tensors)) {
    if (tensor.defined()) broadcast(tensor, GroupRank{0}, {.group = group}, public_place());
  }
}

std::string nonfinite_loss(const torch::Tensor& loss) {
  const auto value = loss.item<double>();
  if (std::isfinite(value)) return {};
  return std::isnan(value) ? "the loss is nan" : format_text("the loss is {}", value);  // a NaN may have a sign
}

void add_nonfinite_gradient(std::string& text, const std::string& name) {
  text += format_text("{}the gradient of parameter {} is not finite", text.empty() ? "" : " and ", name);
}

}  // namespace trainer

namespace {

/// How many ranks have different batches, and which of them this rank is.
struct DataShare {
  explicit DataShare(const std::shared_ptr<ProcessGroup>& group)
      : ranks(group ? group->size() : 1), rank(group ? group->rank() : 0) {}
  DataShare(int all, int own) : ranks(all), rank(own) {}
  int ranks, rank;
};

DataShare share_of_data(const strategy::DataParallel& one) {
  return DataShare(trainer::group_or_default(one.ddp.group));
}
DataShare share_of_data(const strategy::Zero1& one) { return DataShare(trainer::group_or_default(one.ddp.group)); }
DataShare share_of_data(const strategy::FullySharded& one) {
  MANIPLE_REQUIRE(one.shard.group || !one.tensor_group || one.tensor_group->size() == 1,
                  "divide_data: strategy FullySharded has a tensor_group; set shard.group as well, to the ranks that "
                  "divide the parameters");
  const auto group = trainer::group_or_default(one.shard.group);
  const auto& replicas = one.shard.replicate_group;
  if (!group || (!one.tensor_group && !replicas)) return DataShare(group);
  const auto world = trainer::world_of("FullySharded", one.world, {group, replicas, one.tensor_group});
  if (!one.tensor_group) return DataShare(world);
  if (!replicas) return DataShare(group);
  return {group->size() * replicas->size(), replicas->rank() * group->size() + group->rank()};
}
DataShare share_of_data(const strategy::TensorParallel& one) { return DataShare(one.data_group); }
DataShare share_of_data(const strategy::Pipeline& one) { return DataShare(one.data_group); }

}  // namespace

SamplerOptions divide_data(const Strategy& strategy, SamplerOptions options) {
  const DataShare share = std::visit([](const auto& one) { return share_of_data(one); }, strategy);
  options.num_replicas = share.ranks;
  options.rank = share.rank;
  return options;
}

}  // namespace maniple
