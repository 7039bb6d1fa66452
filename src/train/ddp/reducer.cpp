#include "train/ddp/reducer.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "train/ddp/unused_parameters.h"
#include "train/ddp/overlap.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

std::vector<torch::Tensor> tensors(const std::vector<NamedTensor>& named) {
  std::vector<torch::Tensor> result;
  for (const NamedTensor& one : named) result.push_back(one.tensor);
  return result;
}

}  // namespace

/// Lives in autograd's list of callbacks. Either it is called, or it is destroyed without.
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

std::shared_ptr<Reducer> Reducer::make(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options) {
  MANIPLE_REQUIRE(options.bucket_cap_mb > 0, "DistributedDataParallel: bucket_cap_mb is {}; it must be positive",
                  options.bucket_cap_mb);
  MANIPLE_REQUIRE(options.first_bucket_mb >= 0,
                  "DistributedDataParallel: first_bucket_mb is {}; it must not be negative", options.first_bucket_mb);
  if (!options.process_group) options.process_group = get_default_group();
  options.process_group->require_member("DistributedDataParallel");
  std::shared_ptr<Reducer> reducer(new Reducer(module, std::move(options)));
  reducer->attach_hooks();
  return reducer;
}

Reducer::Reducer(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options)
    : options_(std::move(options)),
      group_(options_.process_group),
      module_(module),
      buffers_(group_, {}),
      active_(group_->size()) {
  ModuleTensors all = tensors_of(*module);
  require_same_on_all_ranks(*group_, options_, all);
  state_ = tensors(all.trained);
  for (const auto* more : {&all.frozen, &all.buffers}) {
    for (const NamedTensor& one : *more) state_.push_back(one.tensor);
  }
  if (options_.init_sync) Replicator(group_, state_).copy_from(0);
  if (options_.broadcast_buffers) buffers_ = Replicator(group_, tensors(all.buffers));
  parameters_ = std::move(all.trained);
  for (const auto& [name, tensor] : parameters_) {
    dtypes_.push_back(tensor.scalar_type());
    known_.insert(tensor.unsafeGetTensorImpl());
  }
  came_.assign(parameters_.size(), false);
  accumulated_.assign(parameters_.size(), false);
  std::size_t gradient_bytes = 0;
  for (const auto& [name, tensor] : parameters_) gradient_bytes += tensor.nbytes();
  overlap_ = resolve_overlap(options_.overlap, *group_, gradient_bytes);
  came_early_.assign(parameters_.size(), false);
  saved_.resize(parameters_.size());
  note_delayed();
}

// A step that waits for its average must not find us gone.
Reducer::~Reducer() {
  for (Bucket& bucket : buckets_) {
    const bool under_way = bucket.work.valid() && !bucket.work.done();
    if (under_way && bucket.claimed && bucket.claimed->exchange(true)) await_leftover(bucket);
  }
}

void Reducer::note_delayed() {
  delayed_.assign(parameters_.size(), false);
  const auto place = [&](const std::string& name, const char* option) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].name == name) return i;
    }
    throw InvalidArgument(
        format_text("DistributedDataParallel: {} names \"{}\", but the module has no such parameter that requires a "
                    "gradient; take the names of named_parameters()",
                    option, name));
  };
  for (const std::string& name : options_.delay_all_reduce_named_params) {
    delayed_[place(name, "delay_all_reduce_named_params")] = true;
  }
  MANIPLE_REQUIRE(
      std::find(delayed_.begin(), delayed_.end(), false) != delayed_.end(),
      "DistributedDataParallel: delay_all_reduce_named_params names every parameter; leave at least one out, "
      "whose gradient tells that a backward is under way");
  const std::string& hooked = options_.param_to_hook_all_reduce;
  if (hooked.empty()) return;
  MANIPLE_REQUIRE(
      !options_.delay_all_reduce_named_params.empty(),
      "DistributedDataParallel: param_to_hook_all_reduce is {}, but delay_all_reduce_named_params is empty: "
      "there is nothing to delay",
      hooked);
  trigger_ = place(hooked, "param_to_hook_all_reduce");
  MANIPLE_REQUIRE(!delayed_[trigger_],
                  "DistributedDataParallel: param_to_hook_all_reduce is {}, which is itself in "
                  "delay_all_reduce_named_params; choose one whose gradient comes after those of the delayed ones",
                  hooked);
}

std::string Reducer::converted(std::size_t parameter) const {
  const auto& [name, tensor] = parameters_[parameter];
  if (hooks_[parameter].is_attached() && tensor.scalar_type() == dtypes_[parameter] && tensor.device().is_cpu())
    return {};
  return format_text(
      "parameter {} was converted from {} to {} on {} after it was wrapped, which drops its hook: its gradients are no "
      "longer averaged; convert the module first and wrap it then",
      name, c10::toString(dtypes_[parameter]), c10::toString(tensor.scalar_type()), tensor.device().str());
}

std::string Reducer::added() const {
  const auto module = module_.lock();
  if (!module) return {};
  for (const auto& item : module->named_parameters()) {
    const torch::Tensor& tensor = item.value();
    if (!tensor.defined() || !tensor.requires_grad() || known_.count(tensor.unsafeGetTensorImpl()) != 0) continue;
    return format_text(
        "parameter {} requires a gradient and was not there, or required none, when the module was wrapped: its "
        "gradients would not be averaged; change the module first and wrap it then",
        item.key());
  }
  return {};
}

void Reducer::require_unchanged() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (const std::string trouble = converted(i); !trouble.empty()) throw InvalidArgument(who() + trouble);
  }
  if (const std::string trouble = added(); !trouble.empty()) throw InvalidArgument(who() + trouble);
}

void Reducer::attach_hooks() {
  hooks_.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto before = [self = weak_from_this(), i] {
      const auto reducer = self.lock();
      if (!reducer) return;
      if (const std::string trouble = reducer->converted(i); !trouble.empty()) reducer->fail(trouble);
    };
    const auto after = [self = weak_from_this(), i] {
      if (const auto reducer = self.lock()) reducer->explained([&] { reducer->gradient_came(i); });
    };
    hooks_.emplace_back(parameters_[i].tensor, before, after);
  }
}

std::string Reducer::who() const {
  return format_text("[DistributedDataParallel {} rank {}/{}] ", group_->name(), group_->rank(), group_->size());
}

// The others may be waiting for this rank's part of an average that will never come: they get the same text.
void Reducer::fail(const std::string& text) {
  if (group_->size() > 1) group_->abort(text);
  throw InvalidArgument(who() + text);
}

void Reducer::set_weight(double weight) {
  MANIPLE_REQUIRE(options_.average == Average::samples,
                  "DistributedDataParallel: set_weight needs the option average = Average::samples");
  MANIPLE_REQUIRE(weight >= 0 && std::isfinite(weight),
                  "DistributedDataParallel: a weight of {}; expected a number of samples", weight);
  weight_ = weight;
}

void Reducer::register_hook(CommHook hook) {
  MANIPLE_REQUIRE(buckets_.empty() && !running_,
                  "DistributedDataParallel: a communication hook is registered before the first backward");
  MANIPLE_REQUIRE(hook_ == nullptr, "DistributedDataParallel: there is a communication hook already");
  MANIPLE_REQUIRE(hook != nullptr, "DistributedDataParallel: an empty communication hook");
  hook_ = std::move(hook);
}

void Reducer::make_optimizers(const OptimizerFactory& make) {
  MANIPLE_REQUIRE(make != nullptr, "DistributedDataParallel: apply_optimizer_in_backward needs a function");
  MANIPLE_REQUIRE(buckets_.empty() && !running_,
                  "DistributedDataParallel: apply_optimizer_in_backward is called before the first backward");
  MANIPLE_REQUIRE(optimizers_.empty(), "DistributedDataParallel: the optimizer is applied in backward already");
  std::vector<std::shared_ptr<torch::optim::Optimizer>> made;
  for (const auto& [name, parameter] : parameters_) {
    made.push_back(make(name, parameter));
    MANIPLE_REQUIRE(made.back() != nullptr, "DistributedDataParallel: no optimizer was made for parameter {}", name);
    MANIPLE_REQUIRE(
        std::dynamic_pointer_cast<torch::optim::LBFGS>(made.back()) == nullptr,
        "DistributedDataParallel: LBFGS evaluates the loss in its step, so it cannot be applied in backward; "
        "call its step() after backward");
    std::size_t count = 0;
    for (const auto& group : made.back()->param_groups()) {
      for (const auto& one : group.params()) count += one.is_same(parameter) ? 1 : 2;
    }
    MANIPLE_REQUIRE(
        count == 1,
        "DistributedDataParallel: the optimizer made for parameter {} must hold that parameter and no other", name);
  }
  optimizers_ = std::move(made);
}

// What it adds up here is this rank's own, so the next synchronised backward averages it, whether it uses the parameter or not.
void Reducer::gradient_paused(std::size_t parameter) {
  accumulated_[parameter] = true;
  if (expected(parameter)) return;
  fail(format_text(
      "parameter {} got a gradient under no_sync on rank {}, but none in the first backward; the graph is not "
      "static, use find_unused_parameters instead",
      parameters_[parameter].name, group_->rank()));
}

// A gradient that was set to none since counts no more.
std::vector<bool> Reducer::used_here() const {
  std::vector<bool> used = came_;
  for (std::size_t i = 0; i < used.size() && !shadowing_; ++i) {
    if (accumulated_[i] && parameters_[i].tensor.grad().defined()) used[i] = true;
  }
  return used;
}

void Reducer::gradient_came(std::size_t parameter) {
  if (paused_ > 0) return gradient_paused(parameter);
  if (torch::GradMode::is_enabled()) fail("backward with create_graph is not supported: averaging would cut the graph");
  if (!running_ && delayed_[parameter]) {
    // Perhaps in a backward inside the backward, whose end is not the one to wait for.
    came_early_[parameter] = true;
    return;
  }
  if (!running_) begin();
  const std::string& name = parameters_[parameter].name;
  if (came_[parameter] && !delayed_[parameter])
    fail(
        format_text("parameter {} got its gradient twice in one backward (a backward inside a backward is not "
                    "supported) on rank {}",
                    name, group_->rank()));
  if (!expected(parameter))
    fail(
        format_text("parameter {} got a gradient on rank {}, but none in the first backward; the graph is not "
                    "static, use find_unused_parameters instead",
                    name, group_->rank()));
  came_[parameter] = true;
  if (delayed_[parameter]) return delayed_came(parameter);
  if (buckets_.empty()) {
    arrival_.push_back(parameter);
    return;
  }
  const Home home = homes_[parameter];
  Bucket& bucket = buckets_[home.bucket];
  bucket.take(home.place);
  --bucket.pending;
  if (parameter == trigger_) release_delayed();
  if (bucket.pending == 0 && overlap_ != Overlap::none) launch_complete();
}

// A delayed gradient stays where autograd puts it until its bucket is released.
void Reducer::delayed_came(std::size_t parameter) {
  if (buckets_.empty()) return;
  Bucket& bucket = buckets_[homes_[parameter].bucket];
  if (bucket.launched) {
    fail(format_text(
        "parameter {}, whose all_reduce is delayed, got a gradient on rank {} after that of {}, which was to be the "
        "last; choose another param_to_hook_all_reduce, or none",
        parameters_[parameter].name, group_->rank(), parameters_[trigger_].name));
  }
  if (bucket.pending == 0) bucket.take(homes_[parameter].place);
}

// Where one of them is still missing, the end of backward deals with it.
void Reducer::release_delayed() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (delayed_[i] && !came_[i] && expected(i)) return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!delayed_[i]) continue;
    Bucket& bucket = buckets_[homes_[i].bucket];
    bucket.pending = 0;
    if (came_[i]) bucket.take(homes_[i].place);
  }
  if (overlap_ != Overlap::none) launch_complete();
}

void Reducer::begin() {
  at_end_of_backward([end = std::make_shared<EndOfBackward>(weak_from_this())] { end->call(); });
  running_ = true;
  reset();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (came_early_[i]) came_[i] = true;
  }
  came_early_.assign(parameters_.size(), false);
  if (const std::string trouble = added(); !trouble.empty()) fail(trouble);
  if (!join_) return;
  meet(true);
  communicated_ = true;
}

void Reducer::reset() {
  watch_.begin();
  communicated_ = false;
  came_.assign(parameters_.size(), false);
  arrival_.clear();
  factor_.reset();
  saved_.assign(parameters_.size(), torch::Tensor());
  next_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.launched = bucket.settled = false;
    await_leftover(bucket);
    bucket.pending = 0;
    for (const std::size_t member : bucket.members()) {
      bucket.pending += expected(member) ? 1 : 0;
      if (!expected(member) && !shadowing_) take_absent(member);
    }
    if (delayed_[bucket.members().front()]) bucket.pending = 1;  // until they are released together
  }
}

// Backward threw. A bucket that is still under way will be written to: its gradients must not live there any more. They
// are lost, which they would be anyway: half of the others were never computed.
void Reducer::abandon() noexcept {
  running_ = false;
  if (communicated_ && group_->size() > 1 && !group_->error()) {
    try {
      group_->abort(format_text(
          "backward failed on rank {} (its own output says why) after it had begun to average gradients, {} of {} "
          "buckets; going on would average gradients of different parameters with each other. Make a new group and "
          "wrap again, or start again from a checkpoint. With overlap = Overlap::none a backward averages nothing "
          "before it has computed all gradients",
          group_->rank(), next_, buckets_.size()));
    } catch (...) {
      // No memory for the text: the others wait until their deadline.
    }
  }
  communicated_ = false;
  for (Bucket& bucket : buckets_) forget(bucket);
}

// Either we take the claim, and the step that was to follow the average is not taken; or the group's thread has it, and we
// wait for the end of the step, which communicates nothing.
void Reducer::forget(Bucket& bucket) noexcept {
  if (!bucket.work.valid() || bucket.work.done()) return;
  if (bucket.claimed && bucket.claimed->exchange(true)) return await_leftover(bucket);
  bucket.claimed = nullptr;
  bucket.forget_gradients();
}

// A bucket that an earlier backward left behind. If it failed, so has the group, and the next operation says so.
void Reducer::await_leftover(Bucket& bucket) noexcept {
  try {
    if (bucket.work.valid()) bucket.work.wait();
  } catch (...) {
  }
  bucket.work = Work();
}

void Reducer::finish() {
  const torch::NoGradGuard no_grad;
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!came_[i] && expected(i)) missing.push_back(i);
  }
  const bool first = buckets_.empty();
  const bool allowed = options_.static_graph ? expected_.empty() : options_.find_unused_parameters;
  if (!missing.empty() && !allowed) {
    fail(format_text("no gradient in this backward on rank {} for parameters {}; {}", group_->rank(),
                     names_of(missing, parameters_),
                     options_.static_graph
                         ? "they had one in the first backward, so the graph is not static: use "
                           "find_unused_parameters instead"
                         : "use all of them in computing the loss, freeze them (requires_grad_(false)), or construct "
                           "with find_unused_parameters = true"));
  }
  if (first) lay_out();
  average_all();
  buffers_.copy_from(source_);
  saved_.assign(parameters_.size(), torch::Tensor());
  accumulated_.assign(parameters_.size(), false);
  running_ = false;
  communicated_ = false;
  watch_.end(!first);
}

}  // namespace maniple
