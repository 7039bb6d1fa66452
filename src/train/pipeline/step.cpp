#include "train/pipeline/step.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "comm/base/check.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>
#include <maniple/train/activation_checkpoint.h>

namespace maniple {
namespace {

using torch::Tensor;
using Kind = PipelineAction::Kind;

constexpr std::size_t kAhead = 3;          // actions whose receives are posted in advance
constexpr std::int64_t kHeaderWords = 16;  // dtype, requires_grad, dimensions, sizes
constexpr std::size_t kFirstSize = 3;

double wall_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double cpu_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

/// Adds its lifetime to the statistics.
class ComputeTime {
 public:
  explicit ComputeTime(PipelineStatistics& statistics) : statistics_(statistics) {}
  ~ComputeTime() {
    statistics_.compute_ms += wall_ms() - wall_;
    statistics_.cpu_ms += cpu_ms() - cpu_;
  }
  ComputeTime(const ComputeTime&) = delete;
  ComputeTime& operator=(const ComputeTime&) = delete;

 private:
  PipelineStatistics& statistics_;
  double wall_ = wall_ms(), cpu_ = cpu_ms();
};

Tensor header_of(const ActivationShape& shape) {
  MANIPLE_REQUIRE(shape.sizes.size() <= kHeaderWords - kFirstSize,
                  "Pipeline: an activation of {} dimensions; at most {} can be sent", shape.sizes.size(),
                  kHeaderWords - kFirstSize);
  Tensor header = torch::zeros({kHeaderWords}, torch::kInt64);
  auto* const words = header.data_ptr<std::int64_t>();
  words[0] = static_cast<std::int64_t>(shape.dtype);
  words[1] = shape.requires_grad ? 1 : 0;
  words[2] = static_cast<std::int64_t>(shape.sizes.size());
  std::copy(shape.sizes.begin(), shape.sizes.end(), words + kFirstSize);
  return header;
}

Buffer buffer_in(const Tensor& header) {
  return {header.data_ptr(), static_cast<std::size_t>(header.numel()), DType::int64};
}

ActivationShape shape_in(const Tensor& header) {
  const auto* const words = header.data_ptr<std::int64_t>();
  ActivationShape shape;
  shape.dtype = static_cast<torch::ScalarType>(words[0]);
  shape.requires_grad = words[1] != 0;
  shape.sizes.assign(words + kFirstSize, words + kFirstSize + words[2]);
  return shape;
}

}  // namespace

std::string ActivationShape::text() const {
  return format_text("{}[{}]{}", c10::toString(dtype), joined(sizes), requires_grad ? " with a gradient" : "");
}

PipelineStep::PipelineStep(PipelineRank& rank, PipelineCall call, PipelineBatch batch, KnownShapes& shapes)
    : rank_(rank), call_(call), batch_(std::move(batch)), shapes_(shapes) {
  const PipelineShape shape{rank_.rank(), rank_.ranks(), rank_.chunks, static_cast<int>(batch_.rows.size())};
  actions_ = call_ == PipelineCall::step ? info(rank_.options.schedule).make(shape) : forward_actions(shape);
}

std::string PipelineStep::doing() const {
  if (at_ >= actions_.size()) return "the end of a step";
  const PipelineAction& action = actions_[at_];
  return format_text("{} of stage {}, micro-batch {} of {}", action.kind == Kind::forward ? "forward" : "backward",
                     rank_.stage_of(action.chunk), action.micro_batch, batch_.rows.size());
}

void PipelineStep::run() {
  const torch::AutoGradMode grad_mode(call_ == PipelineCall::step);
  const double begin = wall_ms();
  for (at_ = 0; at_ < actions_.size(); ++at_) {
    for (std::size_t i = at_; i < std::min(at_ + kAhead, actions_.size()); ++i) post(actions_[i]);
    actions_[at_].kind == Kind::forward ? forward(actions_[at_]) : backward(actions_[at_]);
    std::erase_if(sends_, [](const Work& work) { return work.done() && work.error() == nullptr; });
  }
  for (const Work& work : sends_) wait(work);
  sends_.clear();
  shapes_.complete = true;
  rank_.statistics.step_ms += wall_ms() - begin;
  ++rank_.statistics.steps;
}

double PipelineStep::mean_loss() const {
  double sum = 0, rows = 0;
  for (std::size_t i = 0; i < losses_.size(); ++i) {
    sum += losses_[i].item<double>() * static_cast<double>(batch_.rows[i]);
    rows += static_cast<double>(batch_.rows[i]);
  }
  return sum / rows;
}

Tensor PipelineStep::output() const { return outputs_.size() == 1 ? outputs_.front() : torch::cat(outputs_); }

// ---- Computing ------------------------------------------------------------------------------------------------------

Tensor PipelineStep::computed(int chunk, const Tensor& input) {
  torch::nn::AnyModule& stage = rank_.stages[chunk];
  if (call_ != PipelineCall::step || !rank_.options.activation_checkpointing) return stage.forward<Tensor>(input);
  return checkpoint([stage](const Tensor& x) mutable { return stage.forward<Tensor>(x); }, input);
}

void PipelineStep::finish_last(int micro_batch, const Tensor& output, Pending& pending) {
  if (call_ == PipelineCall::forward) {
    outputs_.push_back(output);
    return;
  }
  const std::size_t m = micro_batch;
  const Tensor loss = rank_.options.loss(output, batch_.targets[m]);
  MANIPLE_REQUIRE(loss.defined() && loss.numel() == 1,
                  "Pipeline: the loss must be one number, the mean over the rows of a micro-batch; it is {}",
                  loss.defined() ? format_text("[{}]", joined(loss.sizes())) : "undefined");
  losses_.push_back(loss.detach());
  if (call_ != PipelineCall::step || !loss.requires_grad()) return;
  double rows = 0;
  for (const std::int64_t count : batch_.rows) rows += static_cast<double>(count);
  const Tensor weighted = loss * (static_cast<double>(batch_.rows[m]) / rows);
  pending.root = torch::autograd::impl::gradient_edge(weighted);
  pending.root_gradient = torch::ones_like(weighted);
}

void PipelineStep::forward(const PipelineAction& action) {
  const int stage = rank_.stage_of(action.chunk), m = action.micro_batch;
  Pending pending;
  Tensor input;
  if (stage == 0) {
    input = batch_.inputs[m];
  } else {
    input = received(Direction::activation, {stage - 1, m}, action.chunk, stage - 1);
    pending.input_shape = shapes_.of.at({stage - 1, m});
    if (pending.input_shape.requires_grad) {
      pending.input = make_node<TakeGradient>();
      torch::autograd::set_history(input, pending.input);
    }
  }
  Tensor output;
  {
    const ComputeTime time(rank_.statistics);
    output = computed(action.chunk, input);
    MANIPLE_REQUIRE(output.defined(), "Pipeline: stage {} returned an undefined tensor", stage);
    if (stage == rank_.last_stage()) finish_last(m, output, pending);
  }
  if (stage != rank_.last_stage()) {
    note_shape({stage, m}, {output.sizes().vec(), output.scalar_type(), output.requires_grad()}, stage + 1);
    if (output.requires_grad()) pending.root = torch::autograd::impl::gradient_edge(output);
    // tensor_data() keeps the version counter: autograd detects it if a stage of this rank changes the output in place
    // and the graph here still needs it.
    deliver(Direction::activation, {stage, m}, output.tensor_data(), stage + 1);
  }
  if (call_ == PipelineCall::step) pending_[{action.chunk, m}] = std::move(pending);
}

void PipelineStep::backward(const PipelineAction& action) {
  const int stage = rank_.stage_of(action.chunk), m = action.micro_batch;
  const auto found = pending_.find({action.chunk, m});
  MANIPLE_ASSERT(found != pending_.end());
  Pending pending = std::move(found->second);
  pending_.erase(found);
  if (pending.root.is_valid()) {
    Tensor gradient = pending.root_gradient;
    if (stage != rank_.last_stage()) {
      gradient = received(Direction::gradient, {stage, m}, action.chunk, stage + 1);
    }
    const ComputeTime time(rank_.statistics);
    const auto& averager = rank_.averagers[action.chunk];
    std::optional<NoSync> no_sync;
    if (averager && m + 1 < std::ssize(batch_.rows)) no_sync.emplace(averager->reducer());
    torch::autograd::Engine::get_default_engine().execute({pending.root}, {gradient}, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  if (!pending.input) return;
  Tensor gradient = std::move(pending.input->gradient);
  if (!gradient.defined()) {  // the stage did not use its input
    const auto options = torch::TensorOptions(pending.input_shape.dtype);
    gradient = torch::zeros(pending.input_shape.sizes, options.device(rank_.devices[action.chunk]));
  }
  deliver(Direction::gradient, {stage - 1, m}, gradient.detach(), stage - 1);
}

// ---- Messages -------------------------------------------------------------------------------------------------------

int PipelineStep::tag_of(Direction direction, Key key, bool header) const {
  const int message = key.second * (rank_.last_stage() + 1) + key.first;
  return 4 * message + 2 * (direction == Direction::gradient ? 1 : 0) + (header ? 1 : 0);
}

void PipelineStep::wait(const Work& work) {
  const double begin = wall_ms();
  work.wait();
  rank_.statistics.wait_ms += wall_ms() - begin;
}

/// On the sender of an activation: sends the shape if the receiver cannot know it.
void PipelineStep::note_shape(Key key, const ActivationShape& shape, int to_stage) {
  const auto known = shapes_.of.find(key);
  if (known == shapes_.of.end()) {
    MANIPLE_ASSERT(!shapes_.complete);
    shapes_.of.emplace(key, shape);
    if (rank_of(to_stage) == rank_.rank()) return;
    const Tensor header = header_of(shape);
    sends_.push_back(
        rank_.group
            ->isend(buffer_in(header), rank_of(to_stage), tag_of(Direction::activation, key, true), {}, public_place())
            .then([header] {}));
    return;
  }
  MANIPLE_REQUIRE(
      known->second == shape,
      "Pipeline: stage {} returned {} for micro-batch {}, but {} in an equal step before; shapes that depend "
      "on values need .dynamic_shapes = true",
      key.first, shape.text(), key.second, known->second.text());
}

void PipelineStep::deliver(Direction direction, Key key, const Tensor& tensor, int to_stage) {
  if (rank_of(to_stage) == rank_.rank()) {
    incoming_[{direction, key}].tensor = tensor;
    return;
  }
  rank_.statistics.sent_bytes += tensor.nbytes();
  sends_.push_back(
      isend(tensor, GroupRank{rank_of(to_stage)}, tag_of(direction, key), {.group = rank_.group}, public_place()));
}

void PipelineStep::post_data(Direction direction, Key key, const ActivationShape& shape, int chunk) {
  Incoming& one = incoming_[{direction, key}];
  if (one.work.valid()) return;
  const int from = rank_of(direction == Direction::activation ? key.first : key.first + 1);
  one.tensor = torch::empty(shape.sizes, torch::TensorOptions(shape.dtype).device(rank_.devices[chunk]));
  one.work = irecv(one.tensor, GroupRank{from}, tag_of(direction, key), {.group = rank_.group}, public_place());
}

/// Posts the receives of an action, as far as their shapes are known.
void PipelineStep::post(const PipelineAction& action) {
  const int stage = rank_.stage_of(action.chunk), m = action.micro_batch;
  if (action.kind == Kind::forward) {
    if (stage == 0 || rank_of(stage - 1) == rank_.rank()) return;
    const Key key(stage - 1, m);
    if (const auto known = shapes_.of.find(key); known != shapes_.of.end()) {
      return post_data(Direction::activation, key, known->second, action.chunk);
    }
    Incoming& one = incoming_[{Direction::activation, key}];
    if (one.header_work.valid()) return;
    const Tensor header = one.header = torch::zeros({kHeaderWords}, torch::kInt64);
    one.header_work = rank_.group
                          ->irecv(buffer_in(header), rank_of(stage - 1), tag_of(Direction::activation, key, true),
                                  nullptr, {}, public_place())
                          .then([header] {});
    return;
  }
  if (stage == rank_.last_stage() || rank_of(stage + 1) == rank_.rank()) return;
  const auto known = shapes_.of.find({stage, m});
  if (known != shapes_.of.end() && known->second.requires_grad) {
    post_data(Direction::gradient, {stage, m}, known->second, action.chunk);
  }
}

Tensor PipelineStep::received(Direction direction, Key key, int chunk, int from_stage) {
  if (rank_of(from_stage) != rank_.rank()) {
    Incoming& one = incoming_[{direction, key}];
    if (direction == Direction::activation && one.header_work.valid()) {
      wait(one.header_work);
      shapes_.of.emplace(key, shape_in(one.header));
    }
    post_data(direction, key, shapes_.of.at(key), chunk);
    wait(one.work);
  }
  const auto found = incoming_.find({direction, key});
  MANIPLE_ASSERT(found != incoming_.end() && found->second.tensor.defined());
  Tensor tensor = std::move(found->second.tensor);
  incoming_.erase(found);
  return tensor;
}

std::string PipelineStatistics::text() const {
  const double count = std::max<double>(1, static_cast<double>(steps));
  return format_text(
      "{} steps of {:.2f} ms: {:.2f} ms computing ({:.2f} ms of processor time), {:.2f} ms waiting, idle {:.1f} %, "
      "{:.0f} bytes "
      "sent",
      steps, step_ms / count, compute_ms / count, cpu_ms / count, wait_ms / count, 100 * idle_fraction(),
      static_cast<double>(sent_bytes) / count);
}

}  // namespace maniple
