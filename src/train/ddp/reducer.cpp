#include "train/ddp/reducer.h"

#include <cmath>

#include "base/check.h"
#include "train/ddp/missing.h"
#include "train/ddp/overlap.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

std::vector<torch::Tensor> tensors(const std::vector<NamedTensor>& named) {
  std::vector<torch::Tensor> result;
  for (const NamedTensor& one : named) result.push_back(one.tensor);
  return result;
}

double bytes_of_mb(double mb) { return mb * 1024 * 1024; }

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
      reducer->finish();
    } catch (...) {
      reducer->abandon();
      throw;
    }
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  bool called_ = false;
};

std::shared_ptr<Reducer> Reducer::make(const torch::nn::Module& module, DdpOptions options) {
  MANIPLE_REQUIRE(options.bucket_cap_mb > 0, "DistributedDataParallel: bucket_cap_mb is {}; it must be positive",
                  options.bucket_cap_mb);
  MANIPLE_REQUIRE(options.first_bucket_mb >= 0,
                  "DistributedDataParallel: first_bucket_mb is {}; it must not be negative", options.first_bucket_mb);
  if (!options.process_group) options.process_group = get_default_group();
  std::shared_ptr<Reducer> reducer(new Reducer(module, std::move(options)));
  reducer->attach_hooks();
  return reducer;
}

Reducer::Reducer(const torch::nn::Module& module, DdpOptions options)
    : options_(std::move(options)),
      group_(options_.process_group),
      buffers_(group_, {}) {
  ModuleTensors all = tensors_of(module);
  require_same_on_all_ranks(*group_, options_, all);
  if (options_.init_sync) {
    std::vector<torch::Tensor> state = tensors(all.trained);
    for (const auto* more : {&all.frozen, &all.buffers}) {
      for (const NamedTensor& one : *more) state.push_back(one.tensor);
    }
    Replicator(group_, std::move(state)).copy_from(0);
  }
  if (options_.broadcast_buffers) buffers_ = Replicator(group_, tensors(all.buffers));
  parameters_ = std::move(all.trained);
  for (const auto& [name, tensor] : parameters_) dtypes_.push_back(tensor.scalar_type());
  came_.assign(parameters_.size(), false);
  std::size_t gradient_bytes = 0;
  for (const auto& [name, tensor] : parameters_) gradient_bytes += tensor.nbytes();
  overlap_ = resolve_overlap(options_.overlap, *group_, gradient_bytes);
}

void Reducer::require_unchanged() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const torch::Tensor& tensor = parameters_[i].tensor;
    MANIPLE_REQUIRE(tensor.scalar_type() == dtypes_[i] && tensor.device().is_cpu(),
                    "DistributedDataParallel: parameter {} was converted from {} to {} on {} after it was wrapped, "
                    "which drops its hook; "
                    "convert the module first and wrap it then",
                    parameters_[i].name, c10::toString(dtypes_[i]), c10::toString(tensor.scalar_type()),
                    tensor.device().str());
  }
}

void Reducer::attach_hooks() {
  hooks_.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.emplace_back(parameters_[i].tensor, [self = weak_from_this(), i] {
      if (const auto reducer = self.lock()) reducer->gradient_came(i);
    });
  }
}

std::string Reducer::who() const {
  return fmt::format("[DistributedDataParallel {} rank {}/{}] ", group_->name(), group_->rank(), group_->size());
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

void Reducer::gradient_came(std::size_t parameter) {
  if (paused_ > 0) return;
  if (torch::GradMode::is_enabled()) fail("backward with create_graph is not supported: averaging would cut the graph");
  if (!running_) begin();
  const std::string& name = parameters_[parameter].name;
  if (came_[parameter])
    fail(
        fmt::format("parameter {} got its gradient twice in one backward (a backward inside a backward is not "
                    "supported) on rank {}",
                    name, group_->rank()));
  if (!expected(parameter))
    fail(
        fmt::format("parameter {} got a gradient on rank {}, but none in the first backward; the graph is not "
                    "static, use find_unused_parameters instead",
                    name, group_->rank()));
  came_[parameter] = true;
  if (buckets_.empty()) {
    arrival_.push_back(parameter);
    return;
  }
  const Home home = homes_[parameter];
  Bucket& bucket = buckets_[home.bucket];
  bucket.take(home.place);
  if (--bucket.pending == 0 && overlap_ != Overlap::none) launch_complete();
}

void Reducer::begin() {
  at_end_of_backward([end = std::make_shared<EndOfBackward>(weak_from_this())] { end->call(); });
  running_ = true;
  watch_.begin();
  came_.assign(parameters_.size(), false);
  arrival_.clear();
  factor_.reset();
  saved_.clear();
  next_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.launched = false;
    await_leftover(bucket);
    bucket.pending = 0;
    for (const std::size_t member : bucket.members()) {
      bucket.pending += expected(member) ? 1 : 0;
      if (!expected(member)) take_absent(member);
    }
  }
}

// Backward threw. A bucket that is still under way will be written to: its gradients must not live there any more. They
// are lost, which they would be anyway: half of the others were never computed.
void Reducer::abandon() noexcept {
  running_ = false;
  for (Bucket& bucket : buckets_) {
    if (bucket.work.valid() && !bucket.work.done()) bucket.forget_gradients();
  }
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
  const bool allowed = options_.static_graph ? first : options_.find_unused_parameters;
  if (!missing.empty() && !allowed) {
    fail(fmt::format("no gradient in this backward on rank {} for parameters {}; {}", group_->rank(),
                     names_of(missing, parameters_),
                     options_.static_graph
                         ? "they had one in the first backward, so the graph is not static: use "
                           "find_unused_parameters instead"
                         : "use all of them in computing the loss, freeze them (requires_grad_(false)), or construct "
                           "with find_unused_parameters = true"));
  }
  if (first) lay_out();
  average_all();
  buffers_.copy_from(0);
  saved_.clear();
  running_ = false;
  watch_.end(!first);
}

// All ranks follow rank 0. Gradients that did not come stand at the end, in the reverse order of registration, as they
// would come in most modules.
void Reducer::lay_out() {
  std::vector<std::int64_t> order(arrival_.begin(), arrival_.end());
  for (std::size_t i = parameters_.size(); i-- > 0;) {
    if (!came_[i]) order.push_back(static_cast<std::int64_t>(i));
  }
  group_->broadcast(buffer_of(order), 0);

  std::vector<PlannedParameter> sizes;
  for (const auto& [name, tensor] : parameters_) {
    sizes.push_back({static_cast<std::size_t>(tensor.numel()), static_cast<std::size_t>(tensor.element_size()),
                     static_cast<int>(tensor.scalar_type())});
  }
  const std::vector<std::size_t> places(order.begin(), order.end());
  const auto plans =
      plan_buckets(sizes, places, {bytes_of_mb(options_.first_bucket_mb), bytes_of_mb(options_.bucket_cap_mb)});
  std::size_t bytes = 0;
  for (const PlannedBucket& plan : plans) bytes += plan.bytes;
  const RegisteredMemory memory = group_->allocate(std::max<std::size_t>(bytes, 1));

  std::vector<Bucket> buckets;
  homes_.resize(parameters_.size());
  std::size_t offset = 0;
  for (std::size_t b = 0; b < plans.size(); ++b) {
    buckets.emplace_back(static_cast<int>(b), b + 1 == plans.size(), plans[b], parameters_, memory, offset,
                         options_.gradient_as_bucket_view);
    offset += plans[b].bytes;
    for (std::size_t i = 0; i < plans[b].members.size(); ++i) homes_[plans[b].members[i]] = {b, i};
  }
  for (Bucket& bucket : buckets) {
    for (std::size_t i = 0; i < bucket.members().size(); ++i) {
      if (came_[bucket.members()[i]]) bucket.take(i);
    }
  }
  buckets_ = std::move(buckets);
}

// A gradient that is missing here counts as it is: as zero when there is none, otherwise as what earlier backwards left
// (which is their average already, so averaging leaves it). If it turns out to be missing everywhere, what was there is
// put back untouched.
void Reducer::take_absent(std::size_t parameter) {
  const torch::NoGradGuard no_grad;
  const Home home = homes_[parameter];
  Bucket& bucket = buckets_[home.bucket];
  if (torch::Tensor before = bucket.saved(home.place); before.defined())
    saved_.emplace_back(parameter, std::move(before));
  bucket.take(home.place);
}

void Reducer::average_all() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!came_[i] && expected(i)) take_absent(i);
  }
  for (Bucket& bucket : buckets_) bucket.pending = 0;
  launch_complete();

  const bool ask = options_.static_graph ? used_.empty() : options_.find_unused_parameters;
  if (ask) used_ = used_anywhere(*group_, came_);
  if (options_.static_graph && expected_.empty()) expected_ = came_;
  for (Bucket& bucket : buckets_) wait_for(bucket);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Home home = homes_[i];
    if (used_.empty() || used_[i]) buckets_[home.bucket].give_back(home.place);
  }
  for (const auto& [i, before] : saved_) {
    if (!used_.empty() && !used_[i]) buckets_[homes_[i].bucket].slot(homes_[i].place).copy_(before);
  }
}

void Reducer::launch_complete() {
  while (next_ < buckets_.size() && buckets_[next_].pending == 0) launch(buckets_[next_++]);
}

void Reducer::launch(Bucket& bucket) {
  const torch::NoGradGuard no_grad;
  const bool async = overlap_ == Overlap::thread;
  const auto launched = Stopwatch::Clock::now();
  if (options_.average == Average::samples) scale(bucket);
  if (hook_) {
    GradBucket given = bucket.for_hook();
    CommContext comm(group_, async);
    bucket.work = hook_(given, comm);
  } else if (async) {
    bucket.work = group_->all_reduce_async(bucket.buffer(), ReduceOp::avg);
  } else {
    group_->all_reduce(bucket.buffer(), ReduceOp::avg);
  }
  bucket.launched = true;
  bucket.launched_at = launched;
  if (bucket.work.valid()) {
    bucket.ended_at = std::make_shared<std::atomic<Stopwatch::Clock::rep>>(0);
    bucket.work = bucket.work.then([ended = bucket.ended_at, memory = bucket.flat()] {
      ended->store(Stopwatch::Clock::now().time_since_epoch().count(), std::memory_order_release);
    });
    return;
  }
  const auto now = Stopwatch::Clock::now();
  watch_.communicated(launched, now);
  watch_.waited(now - launched);
}

// With w ranks' weights and n ranks, multiplying by w n / (sum of w) makes the plain average the weighted one.
void Reducer::scale(Bucket& bucket) {
  if (!factor_) {
    double sum = weight_;
    group_->all_reduce(buffer_of(sum));
    if (sum <= 0) fail("the weights of all ranks are zero; call set_weight with the number of samples");
    factor_ = weight_ * group_->size() / sum;
  }
  bucket.flat().mul_(*factor_);
}

void Reducer::wait_for(Bucket& bucket) {
  if (!bucket.work.valid()) return;
  const auto from = Stopwatch::Clock::now();
  bucket.work.wait();
  watch_.waited(Stopwatch::Clock::now() - from);
  watch_.communicated(bucket.launched_at,
                      Stopwatch::Clock::time_point(Stopwatch::Clock::duration(bucket.ended_at->load())));
  bucket.work = Work();
}

DdpStatistics Reducer::statistics() const {
  DdpStatistics result;
  result.ranks = group_->size();
  result.overlap = overlap_ == Overlap::thread ? "thread" : overlap_ == Overlap::inline_ ? "inline" : "none";
  result.parameters = parameters_.size();
  for (const Bucket& bucket : buckets_) {
    DdpStatistics::Bucket& one = result.buckets.emplace_back();
    one.dtype = std::string(to_string(bucket.buffer().dtype));
    one.bytes = bucket.buffer().bytes();
    for (const std::size_t member : bucket.members()) one.parameters.push_back(parameters_[member].name);
    result.gradient_bytes += one.bytes;
  }
  watch_.fill(result);
  return result;
}

}  // namespace maniple
