#include <maniple/train/pipeline.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "comm/base/check.h"
#include "comm/group/tensor_calls.h"
#include "train/pipeline/agreement.h"
#include "train/pipeline/stage_layouts.h"
#include "train/pipeline/step.h"
#include "train/state_key.h"
#include "train/tensor/exception_text.h"
#include "train/tensor/public_call.h"
#include "train/tensor_layout.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

using torch::Tensor;

constexpr Seconds kNoticeLimit(1);
constexpr std::size_t kMostKinds = 64;  // kinds of steps whose shapes are remembered

const char* name_of(PipelineCall call) {
  return call == PipelineCall::step ? "step" : call == PipelineCall::evaluate ? "evaluate" : "forward";
}

/// The stage's name as a child of the Pipeline.
std::string stage_name(int stage) { return format_text("stage{}", stage); }

/// The name of a parameter that two stages share; empty if there is none.
std::string shared_between(const std::vector<torch::nn::AnyModule>& stages) {
  std::map<const void*, std::size_t> stage_of;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    for (const auto& item : stages[i].ptr()->named_parameters()) {
      if (stage_of.emplace(item.value().unsafeGetTensorImpl(), i).first->second != i) return item.key();
    }
  }
  return {};
}

/// Whether the exception being handled is a PeerLost.
bool is_peer_lost() {
  try {
    throw;
  } catch (const PeerLost&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// The devices of the stages' tensors. A stage without tensors gets the device of this rank's other stages, or else the
/// device on which the group communicates.
std::vector<torch::Device> devices_of(const std::vector<torch::nn::AnyModule>& stages, ProcessGroup& group) {
  const auto of_stage = [](const torch::nn::AnyModule& stage, torch::Device otherwise) {
    for (const auto& tensors : {stage.ptr()->parameters(), stage.ptr()->buffers()}) {
      for (const Tensor& tensor : tensors) {
        if (tensor.defined()) return tensor.device();
      }
    }
    return otherwise;
  };
  torch::Device common = torch::kCPU;
  if (const auto device = device_of(group)) common = {torch::kCUDA, static_cast<c10::DeviceIndex>(device->index)};
  for (auto stage = stages.rbegin(); stage != stages.rend(); ++stage) common = of_stage(*stage, common);
  std::vector<torch::Device> devices;
  for (const auto& stage : stages) devices.push_back(of_stage(stage, common));
  return devices;
}

}  // namespace

class Pipeline::Impl {
 public:
  Impl(std::vector<torch::nn::AnyModule> stages, PipelineOptions options);

  double loss_of(PipelineCall call, const Tensor& input, const Tensor& target);
  Tensor forward(const Tensor& input);

  PipelineRank rank;
  std::set<std::string> names;  ///< names in checkpoints, on all ranks together
  bool named_by_stage = false;  ///< names in checkpoints contain the stage, because stages have names in common

 private:
  struct Tied {
    std::string name;
    Tensor parameter;  // undefined on ranks that do not hold it
    std::shared_ptr<ProcessGroup> group;
    Tensor before;  // the gradient before the step; undefined if there was none
  };

  void agree_on_options(ProcessGroup& group, std::string error) const;
  void exchange_names();
  void tie(const NamedTensors& given);
  void average_over(const std::shared_ptr<ProcessGroup>& data_group);
  /// Agrees on the step that all ranks will take, or throws the same InvalidArgument on all ranks.
  PipelineBatch agree(PipelineCall call, const Tensor& input, const Tensor& target);
  std::string mistake_in(PipelineCall call, const Tensor& input, const Tensor& target) const;
  template <class Body>
  void run(PipelineStep& step, const Body& after);

  void wait_until_all_noticed(bool somebody_is_lost) noexcept;

  bool is_first() const { return rank.rank() == 0; }

  StageLayouts layouts_;
  std::vector<Tied> tied_;
  std::map<std::string, KnownShapes> known_;  // keyed by what the ranks reported before such a step
  KnownShapes unknown_;                       // used with dynamic_shapes
  KnownShapes* shapes_ = nullptr;             // shapes of the current step
};

// ---- Construction ---------------------------------------------------------------------------------------------------

Pipeline::Impl::Impl(std::vector<torch::nn::AnyModule> stages, PipelineOptions options) {
  const PublicCall call("the constructor of Pipeline, which all ranks call");
  const std::shared_ptr<ProcessGroup> given = options.group ? options.group : get_default_group();
  given->require_member("Pipeline");
  rank.options = std::move(options);
  rank.stages = std::move(stages);
  rank.chunks = static_cast<int>(rank.stages.size());
  std::string error;
  for (std::size_t i = 0; i < rank.stages.size(); ++i) {
    if (rank.stages[i].is_empty()) error = format_text("stages[{}] is empty", i);
  }
  for (const auto& [name, tensor] : rank.options.tied) {
    if (!tensor.defined()) error = format_text("the tied parameter {} is undefined", name);
    if (name.empty() || name.find_first_of(" \n") != std::string::npos)
      error = format_text("a tied parameter's name is \"{}\"; expected no blanks", name);
  }
  if (error.empty() && rank.options.data_group) {
    if (const std::string name = shared_between(rank.stages); !name.empty()) {
      error = format_text(
          "two stages share the parameter {}, which cannot be averaged over data_group; put both into one stage", name);
    }
  }
  agree_on_options(*given, error);
  std::vector<int> all(given->size());
  std::iota(all.begin(), all.end(), 0);
  rank.group = given->new_group(all, {}, {}, public_place());
  // Each rank sends and posts receives in the order of its schedule, so messages are matched by tags.
  match_by_tags(*rank.group);
  rank.devices = devices_of(rank.stages, *rank.group);
  rank.averagers.resize(rank.stages.size());
  exchange_names();
  for (int chunk = 0; chunk < rank.chunks; ++chunk)
    layouts_.add(*rank.stages[chunk].ptr(), rank.group, format_text("Pipeline stage {}", rank.stage_of(chunk)));
  tie(rank.options.tied);
  if (rank.options.data_group) average_over(rank.options.data_group);
}

void Pipeline::Impl::agree_on_options(ProcessGroup& group, std::string error) const {
  const PipelineOptions& options = rank.options;
  if (error.empty() && rank.chunks == 0) error = "no stages; each rank has at least one";
  if (error.empty() && options.ddp.group) error = "PipelineOptions::ddp.group is set; set data_group instead";
  if (error.empty() && options.micro_batches < 1) {
    error = format_text("{} micro-batches; expected at least 1", options.micro_batches);
  }
  if (error.empty() && rank.chunks > 1 && !info(options.schedule).several_stages) {
    error = format_text("schedule {} has one stage for each rank, not {}; take PipelineSchedule::interleaved",
                        info(options.schedule).name, rank.chunks);
  }
  const std::string mine =
      format_text("{} stages, {} micro-batches, schedule {}, {}", rank.chunks, options.micro_batches,
                  info(options.schedule).name, options.dynamic_shapes ? "dynamic shapes" : "shapes agreed once");
  const auto texts = group.all_gather_objects(one_line(error) + "\n" + mine, {}, public_place());
  std::string first;
  for (std::size_t other = 0; other < texts.size(); ++other) {
    const std::size_t line = texts[other].find('\n');
    const std::string wrong = texts[other].substr(0, line), options_there = texts[other].substr(line + 1);
    MANIPLE_REQUIRE(wrong.empty(), "Pipeline: rank {}: {}", other, wrong);
    if (other == 0) first = options_there;
    MANIPLE_REQUIRE(options_there == first, "Pipeline: rank 0 has {}, but rank {} has {}; give all ranks the same",
                    first, other, options_there);
  }
}

void Pipeline::Impl::exchange_names() {
  std::string mine;
  for (int chunk = 0; chunk < rank.chunks; ++chunk) {
    const torch::nn::Module& stage = *rank.stages[chunk].ptr();
    for (const auto& tensors : {stage.named_parameters(), stage.named_buffers()}) {
      for (const auto& item : tensors) mine += format_text("{} {}\n", stage_name(rank.stage_of(chunk)), item.key());
    }
  }
  std::map<std::string, std::set<std::string>> stages_with;
  for (const std::string& text : rank.group->all_gather_objects(mine, {}, public_place())) {
    std::istringstream lines(text);
    std::string stage, name;
    while (lines >> stage >> name) stages_with[name].insert(stage);
  }
  for (const auto& [name, stages] : stages_with) named_by_stage = named_by_stage || stages.size() > 1;
  for (const auto& [name, stages] : stages_with) {
    for (const std::string& stage : stages) names.insert(named_by_stage ? dotted(stage, name) : name);
  }
}

void Pipeline::Impl::tie(const NamedTensors& given) {
  std::string mine;
  for (const auto& [name, tensor] : given) {
    mine += format_text("{} {}[{}]\n", name, c10::toString(tensor.scalar_type()), joined(tensor.sizes(), ","));
  }
  struct Holders {
    std::vector<int> ranks;
    std::string shape;
  };
  std::map<std::string, Holders> holders;
  const auto texts = rank.group->all_gather_objects(mine, {}, public_place());
  for (std::size_t other = 0; other < texts.size(); ++other) {
    std::istringstream lines(texts[other]);
    std::string name, shape;
    while (lines >> name >> shape) {
      Holders& one = holders[name];
      if (one.ranks.empty()) one.shape = shape;
      MANIPLE_REQUIRE(one.shape == shape, "Pipeline: the tied parameter {} is {} on rank {}, but {} on rank {}", name,
                      one.shape, one.ranks.front(), shape, other);
      MANIPLE_REQUIRE(one.ranks.empty() || one.ranks.back() != static_cast<int>(other),
                      "Pipeline: rank {} gives the tied parameter {} twice; stages of one rank share the tensor itself",
                      other, name);
      one.ranks.push_back(static_cast<int>(other));
    }
  }
  for (const auto& [name, one] : holders) {
    MANIPLE_REQUIRE(one.ranks.size() > 1,
                    "Pipeline: the tied parameter {} is on rank {} only; is it spelt alike elsewhere?", name,
                    one.ranks.front());
  }
  for (const auto& [name, one] : holders) {
    Tied tied{name, {}, rank.group->new_group(one.ranks, {}, {}, public_place()), {}};
    for (const auto& [own, tensor] : given) {
      if (own == name) tied.parameter = tensor;
    }
    if (!tied.parameter.defined()) continue;
    const torch::NoGradGuard no_grad;
    broadcast(tied.parameter, GroupRank{0}, {.group = tied.group}, public_place());
    layouts_.tie(tied.parameter, tied.group->rank() == 0);
    tied_.push_back(std::move(tied));
  }
}

void Pipeline::Impl::average_over(const std::shared_ptr<ProcessGroup>& data_group) {
  data_group->require_member("Pipeline: data_group");
  DdpOptions ddp = rank.options.ddp;
  ddp.group = data_group;
  for (std::size_t i = 0; i < rank.stages.size(); ++i) {
    NamedTensors parameters, buffers;
    bool trained = false;
    std::set<const void*> seen;
    for (const auto& item : rank.stages[i].ptr()->named_parameters()) {
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      parameters.emplace_back(item.key(), item.value());
      trained = trained || item.value().requires_grad();
    }
    for (const auto& item : rank.stages[i].ptr()->named_buffers()) {
      if (item.value().defined()) buffers.emplace_back(item.key(), item.value());
    }
    if (trained) rank.averagers[i] = std::make_unique<GradientAverager>(parameters, buffers, ddp);
  }
}

// ---- A step ---------------------------------------------------------------------------------------------------------

std::string Pipeline::Impl::mistake_in(PipelineCall call, const Tensor& input, const Tensor& target) const {
  if (is_first()) {
    if (!input.defined() || input.dim() == 0)
      return "the rank of the first stage needs an input with a dimension of rows";
    if (input.size(0) == 0 && call != PipelineCall::forward) return "a batch of no rows has no mean loss";
  }
  if (rank.is_last_rank() && call != PipelineCall::forward) {
    if (!rank.options.loss) return "the rank of the last stage needs PipelineOptions::loss";
    if (!target.defined() || target.dim() == 0)
      return "the rank of the last stage needs a target with a dimension of rows";
  }
  return {};
}

PipelineBatch Pipeline::Impl::agree(PipelineCall call, const Tensor& input, const Tensor& target) {
  PipelineProposal mine;
  mine.call = name_of(call);
  mine.error = mistake_in(call, input, target);
  mine.state = settings_of(rank.stages);
  if (mine.error.empty() && is_first()) {
    mine.input_rows = input.size(0);
    mine.state += format_text(" {}[{}]{}", c10::toString(input.scalar_type()), joined(input.sizes()),
                              input.requires_grad() ? " with a gradient" : "");
  }
  if (mine.error.empty() && rank.is_last_rank() && call != PipelineCall::forward) mine.target_rows = target.size(0);
  const auto texts = rank.group->all_gather_objects(mine.text(), {}, public_place());
  std::string key;
  std::vector<PipelineProposal> all;
  for (const std::string& text : texts) {
    key += text + '\0';
    all.push_back(PipelineProposal::parse(text));
  }
  for (std::size_t other = 0; other < all.size(); ++other) {
    MANIPLE_REQUIRE(all[other].call == all.front().call, "Pipeline: rank 0 calls {}, but rank {} calls {}",
                    all.front().call, other, all[other].call);
    MANIPLE_REQUIRE(all[other].error.empty(), "Pipeline: {}, on rank {}: {}", all[other].call, other, all[other].error);
  }
  const std::int64_t rows = all.front().input_rows;
  MANIPLE_REQUIRE(
      call == PipelineCall::forward || all.back().target_rows == rows,
      "Pipeline: the input of rank 0 has {} rows, but the target of rank {} has {}; both must be of one batch", rows,
      all.size() - 1, all.back().target_rows);
  if (rank.options.dynamic_shapes) {
    unknown_ = {};
    shapes_ = &unknown_;
  } else {
    if (known_.size() >= kMostKinds && known_.count(key) == 0) known_.clear();
    shapes_ = &known_[key];
  }
  PipelineBatch batch;
  batch.rows = micro_batch_rows(rows, rank.options.micro_batches);
  if (is_first()) batch.inputs = cut_rows(input.to(rank.devices.front()), batch.rows);
  if (rank.is_last_rank() && call != PipelineCall::forward)
    batch.targets = cut_rows(target.to(rank.devices.back()), batch.rows);
  return batch;
}

/// Returns when all ranks have noticed that the step failed. The exception may destroy the pipeline next, and other
/// ranks would see closed connections before they learn of the cause. Does not wait if a rank is lost, and never longer
/// than kNoticeLimit.
void Pipeline::Impl::wait_until_all_noticed(bool somebody_is_lost) noexcept {
  try {
    std::vector<std::string> keys;
    for (int other = 0; other < rank.ranks(); ++other) keys.push_back(format_text("failed/{}", other));
    rank.group->store().set(keys[rank.rank()], "1");
    if (!somebody_is_lost) rank.group->store().wait(keys, Deadline::after(kNoticeLimit));
  } catch (const std::exception&) {
    // The caller throws the cause of the failure, not this error.
  }
}

/// Runs a step. An error on this rank aborts the groups, because other ranks would wait for this rank.
template <class Body>
void Pipeline::Impl::run(PipelineStep& step, const Body& after) {
  try {
    step.run();
    after();
  } catch (...) {
    const std::string text = exception_text(std::current_exception());
    const std::string reason = format_text("Pipeline: {} failed on rank {}: {}", step.doing(), rank.rank(), text);
    if (rank.group->error() == nullptr) rank.group->abort(reason);
    for (const Tied& tied : tied_) {
      if (tied.group->error() == nullptr) tied.group->abort(reason);
    }
    if (const auto& data = rank.options.data_group; data && data->error() == nullptr) data->abort(reason);
    wait_until_all_noticed(is_peer_lost());
    throw;
  }
}

double Pipeline::Impl::loss_of(PipelineCall call, const Tensor& input, const Tensor& target) {
  const PublicCall named(call == PipelineCall::step ? "Pipeline::step, which all ranks call"
                                                    : "Pipeline::evaluate, which all ranks call");
  PipelineBatch batch = agree(call, input, target);  // also sets shapes_
  PipelineStep step(rank, call, std::move(batch), *shapes_);
  const bool trains = call == PipelineCall::step;
  double loss = 0;
  for (Tied& tied : tied_) {
    const torch::NoGradGuard no_grad;
    Tensor& gradient = tied.parameter.mutable_grad();
    tied.before = trains && gradient.defined() ? gradient.clone() : Tensor();
    if (tied.before.defined()) gradient.zero_();
  }
  run(step, [&] {
    const torch::NoGradGuard no_grad;
    for (Tied& tied : tied_) {
      if (!trains || !tied.parameter.requires_grad()) continue;
      Tensor& gradient = tied.parameter.mutable_grad();
      if (!gradient.defined()) gradient = torch::zeros_like(tied.parameter);
      all_reduce(gradient, ReduceOp::sum, {.group = tied.group}, public_place());
      if (tied.before.defined()) gradient.add_(tied.before);
    }
    if (rank.is_last_rank()) loss = step.mean_loss();
    rank.group->broadcast(buffer_of(loss), rank.ranks() - 1, {}, public_place());
  });
  for (Tied& tied : tied_) tied.before = Tensor();
  return loss;
}

Tensor Pipeline::Impl::forward(const Tensor& input) {
  const PublicCall named("Pipeline::forward, which all ranks call");
  PipelineBatch batch = agree(PipelineCall::forward, input, {});
  PipelineStep step(rank, PipelineCall::forward, std::move(batch), *shapes_);
  Tensor output;
  run(step, [&] {
    if (rank.is_last_rank()) output = step.output();
  });
  return output;
}

// ---- Pipeline -------------------------------------------------------------------------------------------------------

Pipeline::Pipeline(std::vector<torch::nn::AnyModule> stages, PipelineOptions options)
    : torch::nn::Module("Pipeline"), impl_(std::make_unique<Impl>(std::move(stages), std::move(options))) {
  for (int chunk = 0; chunk < impl_->rank.chunks; ++chunk) {
    register_module(stage_name(impl_->rank.stage_of(chunk)), impl_->rank.stages[chunk].ptr());
  }
}
Pipeline::~Pipeline() = default;

double Pipeline::step(const Tensor& input, const Tensor& target) {
  return impl_->loss_of(PipelineCall::step, input, target);
}
double Pipeline::evaluate(const Tensor& input, const Tensor& target) {
  return impl_->loss_of(PipelineCall::evaluate, input, target);
}
Tensor Pipeline::forward(const Tensor& input) { return impl_->forward(input); }

std::vector<Tensor> Pipeline::trained_parameters() const {
  std::vector<Tensor> result = detail::distinct(parameters());
  std::erase_if(result, [](const Tensor& one) { return !one.requires_grad(); });
  return result;
}
int Pipeline::stages() const noexcept { return impl_->rank.last_stage() + 1; }
bool Pipeline::has_first_stage() const noexcept { return impl_->rank.rank() == 0; }
bool Pipeline::has_last_stage() const noexcept { return impl_->rank.is_last_rank(); }
const PipelineStatistics& Pipeline::statistics() const noexcept { return impl_->rank.statistics; }

std::string Pipeline::checkpoint_name(const std::string& name) const {
  return impl_->named_by_stage ? name : inner_name(name);
}
const std::set<std::string>& Pipeline::names_of_all_ranks() const { return impl_->names; }
const std::shared_ptr<ProcessGroup>& Pipeline::divided_over() const { return impl_->rank.group; }

}  // namespace maniple
