// The course of a backward. reducer_average.cpp has the course of a bucket.
#include "train/ddp/reducer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/base/check.h"
#include "train/ddp/bucket.h"
#include "train/tensor/public_call.h"
#include "train/tensor_layout.h"
#include <maniple/dist.h>

namespace maniple::detail {
namespace {

std::vector<torch::Tensor> tensors(const std::vector<NamedTensor>& named) {
  std::vector<torch::Tensor> result;
  for (const NamedTensor& one : named) result.push_back(one.tensor);
  return result;
}

}  // namespace

// ---- Construction and settings --------------------------------------------------------------------------------------

std::shared_ptr<Reducer> Reducer::make(TensorSource source, DdpOptions options) {
  MANIPLE_REQUIRE(options.bucket_cap_mb > 0, "DistributedDataParallel: bucket_cap_mb is {}; it must be positive",
                  options.bucket_cap_mb);
  MANIPLE_REQUIRE(options.first_bucket_mb >= 0,
                  "DistributedDataParallel: first_bucket_mb is {}; it must not be negative", options.first_bucket_mb);
  if (!options.group) options.group = get_default_group();
  options.group->require_member("DistributedDataParallel");
  const PublicCall call("the constructor of DistributedDataParallel, which all ranks call");
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(source), std::move(options)));
  reducer->attach_hooks();
  return reducer;
}

Reducer::Reducer(TensorSource source, DdpOptions options)
    : options_(std::move(options)),
      group_(options_.group),
      source_(std::move(source)),
      buffers_(group_, {}),
      active_(group_) {
  ModuleTensors all = tensors_of(source_);
  for (const auto* parameters : {&all.trained, &all.frozen}) {
    for (const NamedTensor& one : *parameters)
      detail::require_replicated_over(
          *group_, one.name, one.tensor, "DistributedDataParallel",
          "fully_shard averages gradients by itself; for replicas of sharded parameters set "
          "FullyShardOptions::replicate_group");
  }
  require_device_ids(options_.device_ids, all);
  require_same_on_all_ranks(*group_, options_, all);
  state_ = tensors(all.trained);
  first_buffer_ = all.trained.size() + all.frozen.size();
  for (const auto* more : {&all.frozen, &all.buffers}) {
    for (const NamedTensor& one : *more) state_.push_back(one.tensor);
  }
  if (options_.init_sync) Replicator(group_, state_).copy_from(0);
  if (options_.broadcast_buffers) buffers_ = Replicator(group_, tensors(all.buffers));
  std::size_t gradient_bytes = 0;
  for (NamedTensor& named : all.trained) {
    gradient_bytes += named.tensor.nbytes();
    known_.insert(named.tensor.unsafeGetTensorImpl());
    parameters_.emplace_back(std::move(named));
  }
  const bool on_devices =
      std::none_of(parameters_.begin(), parameters_.end(), [](const Parameter& one) { return one.device.is_cpu(); });
  // On GPUs buckets are averaged concurrently with backward, without occupying a CPU thread.
  overlap_ = on_devices && options_.overlap == Overlap::automatic
                 ? Overlap::thread
                 : resolve_overlap(options_.overlap, *group_, gradient_bytes);
  delayed_.emplace(options_, parameters_, buckets_);
}

// Waits for steps and exchanges in flight: they use this object.
Reducer::~Reducer() {
  for (Bucket& bucket : buckets_) {
    const bool under_way = bucket.work.valid() && !bucket.work.done();
    if (under_way && (tree_ || (bucket.claimed && bucket.claimed->exchange(true)))) wait_for_leftover(bucket);
  }
}

void Reducer::attach_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].hook && parameters_[i].hook->is_attached()) continue;
    const auto before = [self = weak_from_this(), i] {
      const auto reducer = self.lock();
      if (!reducer) return;
      if (const std::string error = reducer->parameters_[i].conversion(); !error.empty()) reducer->fail(error);
    };
    const auto after = [self = weak_from_this(), i] {
      if (const auto reducer = self.lock()) reducer->explained([&] { reducer->gradient_ready(i); });
    };
    parameters_[i].hook.emplace(parameters_[i].tensor, before, after);
  }
}

std::string Reducer::added_parameter() const {
  std::string error;
  source_.parameters([&](const std::string& name, const torch::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad() || known_.count(tensor.unsafeGetTensorImpl()) != 0) return;
    if (!error.empty()) return;
    error = format_text(
        "parameter {} requires a gradient and was not there, or required none, when the module was wrapped: its "
        "gradients would not be averaged; change the module first and wrap it then",
        name);
  });
  return error;
}

void Reducer::require_unchanged() {
  for (const Parameter& parameter : parameters_) {
    // A parameter loaded without the wrapper has only lost its hook.
    if (!parameter.hook->is_attached() && parameter.tensor.requires_grad() &&
        parameter.tensor.scalar_type() == parameter.dtype && parameter.tensor.device() == parameter.device)
      attach_hooks();
    if (const std::string error = parameter.conversion(); !error.empty()) {
      throw InvalidArgument(ddp_prefix(*group_) + error);
    }
  }
  if (const std::string error = added_parameter(); !error.empty()) {
    throw InvalidArgument(ddp_prefix(*group_) + error);
  }
}

void Reducer::set_weight(double weight) {
  MANIPLE_REQUIRE(options_.average == Average::samples,
                  "DistributedDataParallel: set_weight needs the option average = Average::samples");
  MANIPLE_REQUIRE(weight >= 0 && std::isfinite(weight),
                  "DistributedDataParallel: a weight of {}; expected a number of samples", weight);
  weight_ = weight;
}

void Reducer::register_hook(CommHook hook) {
  MANIPLE_REQUIRE(!tree_, "DistributedDataParallel: a communication hook cannot be combined with virtual_ranks");
  MANIPLE_REQUIRE(buckets_.empty() && !computes(),
                  "DistributedDataParallel: a communication hook is registered before the first backward");
  MANIPLE_REQUIRE(hook_ == nullptr, "DistributedDataParallel: there is a communication hook already");
  MANIPLE_REQUIRE(hook != nullptr, "DistributedDataParallel: an empty communication hook");
  hook_ = std::move(hook);
}

void Reducer::make_optimizers(const OptimizerFactory& make) {
  MANIPLE_REQUIRE(!tree_, "DistributedDataParallel: apply_optimizer_in_backward cannot be combined with virtual_ranks");
  MANIPLE_REQUIRE(make != nullptr, "DistributedDataParallel: apply_optimizer_in_backward needs a function");
  MANIPLE_REQUIRE(buckets_.empty() && !computes(),
                  "DistributedDataParallel: apply_optimizer_in_backward is called before the first backward");
  MANIPLE_REQUIRE(!steps_in_backward_, "DistributedDataParallel: the optimizer is applied in backward already");
  std::vector<std::shared_ptr<torch::optim::Optimizer>> made;
  for (const Parameter& parameter : parameters_) made.push_back(make_optimizer(make, parameter));
  for (std::size_t i = 0; i < made.size(); ++i) parameters_[i].optimizer = std::move(made[i]);
  steps_in_backward_ = true;
}

std::vector<std::shared_ptr<torch::optim::Optimizer>> Reducer::optimizers() const {
  std::vector<std::shared_ptr<torch::optim::Optimizer>> result;
  for (const Parameter& parameter : parameters_) {
    if (steps_in_backward_) result.push_back(parameter.optimizer);
  }
  return result;
}

std::vector<torch::Tensor> Reducer::trained_parameters() const {
  std::vector<torch::Tensor> result;
  for (const Parameter& parameter : parameters_) result.push_back(parameter.tensor);
  return result;
}

// Aborts the group: other ranks may be waiting for this rank's part of an average that it will never launch. They get
// the same text.
void Reducer::fail(const std::string& text) {
  if (group_->size() > 1) group_->abort(text);
  throw InvalidArgument(ddp_prefix(*group_) + text);
}

// ---- A backward -----------------------------------------------------------------------------------------------------

/// Lives in autograd's list of callbacks. If backward throws, autograd destroys it without calling it.
class Reducer::EndOfBackward {
 public:
  explicit EndOfBackward(std::weak_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  ~EndOfBackward() {
    const auto reducer = reducer_.lock();
    if (reducer && !called_) reducer->abandon();
  }
  void call() {
    called_ = true;
    const auto reducer = reducer_.lock();
    if (!reducer) return;
    try {
      reducer->explained([&] { reducer->finish(); });
    } catch (...) {
      reducer->abandon();
      throw;
    }
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  bool called_ = false;
};

void Reducer::gradient_ready(std::size_t index) {
  const std::lock_guard lock(ready_mutex_);
  Parameter& parameter = parameters_[index];
  if (paused_ > 0) return gradient_accumulated(parameter);
  if (torch::GradMode::is_enabled()) fail("backward with create_graph is not supported: averaging would cut the graph");
  if (!computes() && parameter.delayed) return DelayedGradients::ready_early(parameter);
  if (!computes()) begin();
  if (parameter.ready() && !parameter.delayed)
    fail(
        format_text("parameter {} got its gradient twice in one backward (a backward inside a backward is not "
                    "supported) on rank {}",
                    parameter.name, group_->rank()));
  if (!parameter.expected)
    fail(
        format_text("parameter {} got a gradient on rank {}, but none in the first backward; the graph is not "
                    "static, use find_unused_parameters instead",
                    parameter.name, group_->rank()));
  parameter.gradient = Parameter::Gradient::ready;
  if (parameter.delayed) {
    if (const std::string error = delayed_->ready(parameter, group_->rank()); !error.empty()) fail(error);
    return;
  }
  if (buckets_.empty()) {
    ready_order_.push_back(index);
    return;
  }
  Bucket& bucket = buckets_[parameter.bucket];
  bucket.copy_in(parameter.place);
  --bucket.pending;
  bool complete = bucket.pending == 0;
  if (delayed_->is_trigger(index)) complete = delayed_->release() || complete;
  if (complete && overlap_ != Overlap::none) launch_complete();
}

// A gradient under no_sync. It is accumulated on this rank only, so the next synchronised backward averages it, whether
// or not that backward uses the parameter.
void Reducer::gradient_accumulated(Parameter& parameter) {
  parameter.accumulated = true;
  if (parameter.expected) return;
  fail(format_text(
      "parameter {} got a gradient under no_sync on rank {}, but none in the first backward; the graph is not "
      "static, use find_unused_parameters instead",
      parameter.name, group_->rank()));
}

void Reducer::begin() {
  at_end_of_backward([end = std::make_shared<EndOfBackward>(weak_from_this())] { end->call(); });
  backward_ = Backward::computing;
  reset();
  delayed_->begin_backward();
  if (const std::string error = added_parameter(); !error.empty()) fail(error);
  if (tree_ && !tree_->is_last_turn()) {
    fail(
        "a backward outside Trainer::fit: this module is trained over virtual ranks, whose gradients are averaged once "
        "per step");
  }
  if (!active_.started()) return;
  active_.exchange(true);
  begin_to_average();
}

void Reducer::begin_to_average() noexcept {
  if (backward_ == Backward::computing) backward_ = Backward::averaging;
}

void Reducer::reset() {
  watch_.begin();
  ready_order_.clear();
  factor_.reset();
  next_ = 0;
  for (Parameter& parameter : parameters_) {
    if (parameter.ready()) parameter.gradient = Parameter::Gradient::absent;
    parameter.saved = torch::Tensor();
  }
  for (Bucket& bucket : buckets_) {
    bucket.launched = bucket.finalized = false;
    bucket.forget_noted();
    wait_for_leftover(bucket);
    bucket.pending = 0;
    for (const std::size_t member : bucket.members()) {
      Parameter& parameter = parameters_[member];
      bucket.pending += parameter.expected ? 1 : 0;
      if (!parameter.expected && !shadows()) copy_in_absent(parameter);
    }
    if (parameters_[bucket.members().front()].delayed) bucket.pending = 1;  // until they are released together
  }
}

void Reducer::require_used() {
  std::vector<const Parameter*> unused;
  for (const Parameter& parameter : parameters_) {
    if (!parameter.ready() && parameter.expected) unused.push_back(&parameter);
  }
  if (!unused.empty()) fail_unused(unused);
}

void Reducer::fail_unused(const std::vector<const Parameter*>& unused) {
  fail(format_text("no gradient in this backward on rank {} for parameters {}; {}", group_->rank(), names_of(unused),
                   options_.static_graph
                       ? "they had one in the first backward, so the graph is not static: use "
                         "find_unused_parameters instead"
                       : "use all of them in computing the loss, freeze them (requires_grad_(false)), or construct "
                         "with find_unused_parameters = true"));
}

void Reducer::finish() {
  const torch::NoGradGuard no_grad;
  const bool first = buckets_.empty();
  const bool may_be_unused = options_.static_graph ? graph_ == Graph::unknown : options_.find_unused_parameters;
  if (!may_be_unused) require_used();
  if (first) lay_out();
  average_all();
  copy_buffers();
  end();
  watch_.end(!first);
}

void Reducer::end() {
  for (Parameter& parameter : parameters_) {
    parameter.saved = torch::Tensor();
    if (!shadows()) parameter.accumulated = parameter.kept = false;
  }
  if (tree_) tree_->clear();
  backward_ = Backward::none;
}

// The module's current buffers: forward may have replaced the original tensors.
std::vector<torch::Tensor> Reducer::find_buffers() {
  if (!source_.replaces_buffers) return {};
  std::vector<torch::Tensor> now = buffers_of(source_);
  const auto first = state_.begin() + static_cast<std::ptrdiff_t>(first_buffer_);
  if (!Replicator(group_, {first, state_.end()}).replace(now)) {
    fail(
        format_text("a buffer of the module has another size, dtype or device than when it was wrapped, on rank {}; "
                    "{}",
                    group_->rank(),
                    options_.broadcast_buffers
                        ? "use broadcast_buffers = false if it has to change"
                        : "with_uneven_inputs ends with the same model on all ranks, which such a buffer cannot have"));
  }
  std::copy(now.begin(), now.end(), first);
  return now;
}

void Reducer::copy_buffers() {
  if (source_.replaces_buffers && !buffers_.empty()) buffers_.replace(find_buffers());
  buffers_.copy_from(active_.first());
}

// An accumulated gradient that has since been set to none does not count.
std::vector<bool> Reducer::used_here() const {
  std::vector<bool> used;
  for (const Parameter& parameter : parameters_) {
    used.push_back(parameter.ready() || parameter.kept ||
                   (parameter.accumulated && !shadows() && parameter.tensor.grad().defined()));
  }
  return used;
}

// Backward threw. A bucket in flight will still be written to, so its gradients must no longer live there. They are
// lost in any case: the other gradients of this backward were only partly computed.
void Reducer::abandon() noexcept {
  const Backward abandoned = std::exchange(backward_, Backward::none);
  const bool awaited = abandoned == Backward::averaging || abandoned == Backward::shadowing;
  if (awaited && group_->size() > 1 && !group_->error()) {
    try {
      group_->abort(format_text(
          "backward failed on rank {} (its own output says why) after it had begun to average gradients, {} of {} "
          "buckets; going on would average gradients of different parameters with each other. Make a new group and "
          "wrap again, or start again from a checkpoint. With overlap = Overlap::none a backward averages nothing "
          "before it has computed all gradients",
          group_->rank(), next_, buckets_.size()));
    } catch (...) {
      // No memory for the text: other ranks wait until their deadline.
    }
  }
  for (Bucket& bucket : buckets_) cancel(bucket);
}

// If this thread takes the claim, the step after the average is not taken. Otherwise the group's thread has the claim;
// wait for the end of its step, which does not communicate.
void Reducer::cancel(Bucket& bucket) noexcept {
  if (!bucket.work.valid() || bucket.work.done()) return;
  if (bucket.claimed && bucket.claimed->exchange(true)) return wait_for_leftover(bucket);
  bucket.claimed = nullptr;
  bucket.drop_gradients();
}

// Waits for a bucket left behind by an earlier backward. Ignores its error: the group has failed as well, and the next
// operation reports that.
void Reducer::wait_for_leftover(Bucket& bucket) noexcept {
  try {
    if (bucket.work.valid()) bucket.work.wait();
  } catch (...) {
  }
  bucket.work = Work();
}

// ---- A rank without batches -----------------------------------------------------------------------------------------

void Reducer::start_uneven_inputs(const ActiveRanks::Mode& mode) {
  MANIPLE_REQUIRE(!computes(), "with_uneven_inputs: called inside a backward");
  MANIPLE_REQUIRE(!tree_, "with_uneven_inputs: cannot be combined with virtual_ranks, which have equal inputs");
  active_.start(mode);
}

void Reducer::end_uneven_inputs() noexcept { active_.stop(); }

void Reducer::shadow() {
  const torch::NoGradGuard no_grad;
  backward_ = Backward::shadowing;
  try {
    explained([&] {
      reset();
      if (buckets_.empty()) lay_out();
      average_all();
      copy_buffers();
    });
  } catch (...) {
    abandon();
    throw;
  }
  end();
}

void Reducer::copy_final_model() {
  if (!active_.were_uneven()) return;
  find_buffers();  // also with broadcast_buffers = false, and after a forward without a backward
  Replicator(group_, state_).copy_from(active_.last_first());
}

}  // namespace maniple::detail
