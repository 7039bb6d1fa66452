// Pipeline: the Sequential is cut into stages, and the criterion is the loss of the last stage.
#include <unordered_set>

#include "comm/base/check.h"
#include "train/ddp/parameter.h"
#include "train/tensor_layout.h"
#include "train/trainer/strategy.h"
#include <maniple/dist.h>
#include <maniple/train/pipeline.h>

namespace maniple {
namespace {

using TensorSet = std::unordered_set<const c10::TensorImpl*>;

/// Removes the parameters of other ranks' stages from the optimizer and frees their memory.
void drop_others(torch::nn::Module& whole, Pipeline& pipeline, torch::optim::Optimizer& optimizer) {
  TensorSet here;
  for (const auto& tensors : {pipeline.parameters(), pipeline.buffers()}) {
    for (const torch::Tensor& tensor : tensors) here.insert(tensor.unsafeGetTensorImpl());
  }
  const auto is_elsewhere = [&](const torch::Tensor& tensor) {
    return tensor.defined() && here.count(tensor.unsafeGetTensorImpl()) == 0;
  };
  TensorSet of_model;
  for (const torch::Tensor& parameter : whole.parameters()) of_model.insert(parameter.unsafeGetTensorImpl());
  for (auto& group : optimizer.param_groups()) {
    std::erase_if(group.params(), [&](const torch::Tensor& parameter) {
      return of_model.count(parameter.unsafeGetTensorImpl()) != 0 && is_elsewhere(parameter);
    });
  }
  const torch::NoGradGuard no_grad;
  for (const auto& tensors : {whole.parameters(), whole.buffers()}) {
    for (torch::Tensor tensor : tensors) {
      if (!is_elsewhere(tensor)) continue;
      if (tensor.requires_grad()) tensor.mutable_grad() = torch::Tensor();
      tensor.set_data(torch::empty({0}, tensor.options()));
    }
  }
}

class PipelineStrategy final : public TrainerStrategy {
 public:
  PipelineStrategy(Given given, std::shared_ptr<ProcessGroup> world, std::shared_ptr<ProcessGroup> group, StageCut cut,
                   PipelineOptions options)
      : TrainerStrategy(std::move(given), std::move(world)), group_(std::move(group)) {
    drop_gradients();
    torch::nn::Module& whole = *given_.model.module;
    std::vector<torch::Tensor> all = whole.parameters();
    for (const torch::Tensor& buffer : whole.buffers()) all.push_back(buffer);
    trainer::broadcast_from_first(all, this->world());
    options.loss = [this](const torch::Tensor& output, const torch::Tensor& target) {
      return loss_of_micro_batch(output, target);
    };
    pipeline_ = std::make_shared<Pipeline>(std::move(cut.stages), std::move(options));
    drop_others(whole, *pipeline_, given_.optimizer);
  }

  int data_ranks() const override { return ranks() / group_->size(); }
  bool reports() const override { return pipeline_->has_last_stage(); }
  bool divides_model() const override { return true; }
  ProcessGroup* same_batches() const override { return group_.get(); }
  torch::nn::Module& module() override {
    return pipeline_ ? static_cast<torch::nn::Module&>(*pipeline_) : *given_.model.module;
  }

  void require_usable(const detail::TrainerData& data) const override {
    MANIPLE_REQUIRE(
        data.has_criterion,
        "Trainer: strategy Pipeline calls the stages of the model itself, so its loss is a function of output "
        "and target: pass maniple::criterion([](const torch::Tensor& output, const torch::Tensor& target) "
        "{} ... {}) to fit() and evaluate() instead of a function of the batch",
        "{", "}");
  }

  torch::Tensor loss_of(const detail::TrainerBatch& batch, Metrics& metrics) override {
    const Running running(*this, batch, metrics, 1);
    const std::shared_ptr<void> scope = autocast();
    return torch::full({}, pipeline_->evaluate(batch.data, batch.target), torch::kFloat64);
  }

  torch::Tensor backward(const detail::TrainerBatch& batch, Metrics& metrics, const Scaled& scaled) override {
    const auto factor = scaled(torch::ones({}, torch::kFloat64)).item<double>();
    const Running running(*this, batch, metrics, factor);
    const std::shared_ptr<void> scope = autocast();
    return torch::full({}, pipeline_->step(batch.data, batch.target) / factor, torch::kFloat64);
  }

  // The gradients of this rank's stages still exist. Over a data group they are averages, but the loss shows which
  // pipeline was affected.
  std::string nonfinite_in(const detail::TrainerBatch& batch) override {
    std::string gradients;
    for (const auto& entry : pipeline_->named_parameters()) {
      const torch::Tensor& gradient = entry.value().grad();
      if (!gradient.defined() || torch::isfinite(gradient).all().item<bool>()) continue;
      trainer::add_nonfinite_gradient(gradients, pipeline_->checkpoint_name(entry.key()));
      break;
    }
    drop_gradients();
    Metrics unused;
    const torch::Tensor loss = loss_of(batch, unused);
    const std::string text = trainer::nonfinite_loss(loss);
    if (ranks() > group_->size() && text.empty()) return {};
    return text + (text.empty() || gradients.empty() ? "" : " and ") + gradients;
  }

 private:
  /// What the criterion is called with while a batch passes through the stages.
  struct Running {
    Running(PipelineStrategy& of, const detail::TrainerBatch& batch_, Metrics& metrics_, double factor_)
        : strategy(of), batch(batch_), metrics(metrics_), factor(factor_) {
      strategy.running_ = this;
    }
    ~Running() { strategy.running_ = nullptr; }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    PipelineStrategy& strategy;
    const detail::TrainerBatch& batch;
    Metrics& metrics;
    double factor;
  };

  torch::Tensor loss_of_micro_batch(const torch::Tensor& output, const torch::Tensor& target) {
    const torch::Tensor loss = running_->batch.criterion(output, target, running_->metrics);
    return loss.defined() && running_->factor != 1 ? loss * running_->factor : loss;
  }

  std::shared_ptr<ProcessGroup> group_;
  std::shared_ptr<Pipeline> pipeline_;
  const Running* running_ = nullptr;
};

}  // namespace

std::unique_ptr<TrainerStrategy> trainer::make(const strategy::Pipeline& choice, TrainerStrategy::Given given) {
  MANIPLE_REQUIRE(choice.ddp.group == nullptr,
                  "Trainer: strategy Pipeline: its ddp.group is set; set data_group instead");
  const auto layers = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(given.model.module);
  MANIPLE_REQUIRE(layers != nullptr,
                  "Trainer: strategy Pipeline cuts a torch::nn::Sequential into stages, and the model is {}; make it a "
                  "Sequential of layers, or write the loop with maniple::Pipeline",
                  given.model.module->name());
  require_undivided("Pipeline", *layers);
  require_fresh("Pipeline", given.optimizer);
  MANIPLE_REQUIRE(choice.stages_per_rank == 1 || choice.schedule == PipelineSchedule::interleaved,
                  "Trainer: strategy Pipeline with {} stages for each rank: set its schedule to "
                  "PipelineSchedule::interleaved",
                  choice.stages_per_rank);
  const auto group = group_or_default(choice.group);
  if (!group) return std::make_unique<TrainerStrategy>(std::move(given), nullptr);
  group->require_member("Trainer: strategy Pipeline");
  const auto data_group = choice.data_group && choice.data_group->size() > 1 ? choice.data_group : nullptr;
  const auto world = world_of("Pipeline", choice.world, {group, data_group});
  std::vector<std::string> lines;
  for (const auto& tensors : {layers->named_parameters(), layers->named_buffers()}) {
    for (const auto& entry : tensors)
      lines.push_back(format_text("{}: {} [{}]", entry.key(), c10::toString(entry.value().scalar_type()),
                                  joined(entry.value().sizes())));
  }
  const std::string difference = first_difference(*world, lines);
  MANIPLE_REQUIRE(difference.empty(),
                  "Trainer: strategy Pipeline needs the same Sequential on every rank before it cuts it: {}",
                  difference);
  StageCut cut = cut_into_stages(torch::nn::Sequential(layers),
                                 {.group = group, .stages_per_rank = choice.stages_per_rank, .begins = choice.begins});
  PipelineOptions options{.micro_batches = choice.micro_batches,
                          .schedule = choice.schedule,
                          .activation_checkpointing = choice.activation_checkpointing,
                          .dynamic_shapes = choice.dynamic_shapes,
                          .group = group,
                          .data_group = data_group,
                          .ddp = choice.ddp,
                          .tied = cut.tied};
  return std::make_unique<PipelineStrategy>(std::move(given), world, group, std::move(cut), std::move(options));
}

}  // namespace maniple
