// From complete buckets to averaged gradients, and to parameters that have taken their step.
#include "base/check.h"
#include "train/ddp/unused_parameters.h"
#include "train/ddp/reducer.h"

namespace maniple {
namespace {

double bytes_of_mb(double mb) { return mb * 1024 * 1024; }

}  // namespace

// All ranks follow rank 0 (in join mode, the first active rank). Gradients that did not come stand at the end, in the
// reverse order of registration, as they would come in most modules; after them the delayed ones.
void Reducer::lay_out() {
  std::vector<std::int64_t> order(arrival_.begin(), arrival_.end());
  for (const bool delayed : {false, true}) {
    for (std::size_t i = parameters_.size(); i-- > 0;) {
      if (delayed_[i] == delayed && (delayed || !came_[i])) order.push_back(static_cast<std::int64_t>(i));
    }
  }
  communicated_ = true;
  group_->broadcast(buffer_of(order), source_);

  std::vector<PlannedParameter> sizes;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const torch::Tensor& tensor = parameters_[i].tensor;
    sizes.push_back({static_cast<std::size_t>(tensor.numel()), static_cast<std::size_t>(tensor.element_size()),
                     2 * static_cast<int>(tensor.scalar_type()) + (delayed_[i] ? 1 : 0)});
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
// (which is their average already, so averaging leaves it; or what was added up under no_sync, which is to be averaged). If it
// turns out to be missing everywhere, what was there is put back untouched.
void Reducer::take_absent(std::size_t parameter) {
  const torch::NoGradGuard no_grad;
  const Home home = homes_[parameter];
  Bucket& bucket = buckets_[home.bucket];
  saved_[parameter] = bucket.saved(home.place);
  bucket.take(home.place);
}

// A rank that shadows gives nothing to any gradient. What turns out to be used nowhere keeps what it had.
void Reducer::take_zero(std::size_t parameter) {
  const Home home = homes_[parameter];
  Bucket& bucket = buckets_[home.bucket];
  if (asks_who_is_used() || !used_.empty()) saved_[parameter] = bucket.saved(home.place);
  bucket.slot(home.place).zero_();
}

void Reducer::average_all() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (shadowing_) {
      take_zero(i);
    } else if (!came_[i] && expected(i)) {
      take_absent(i);
    } else if (delayed_[i] && !buckets_[homes_[i].bucket].launched) {
      buckets_[homes_[i].bucket].take(homes_[i].place);
    }
  }
  for (Bucket& bucket : buckets_) bucket.pending = 0;
  launch_complete();

  if (asks_who_is_used()) {
    used_ = used_anywhere(*group_, used_here());
    usage_known_ = active_ == group_->size();
  }
  if (options_.static_graph && expected_.empty() && !shadowing_) expected_ = came_;
  for (Bucket& bucket : buckets_) wait_for(bucket);
  for (Bucket& bucket : buckets_) {
    if (!bucket.settled) settle(bucket);
  }
}

// Autograd is told that the parameters have changed: should a part of the graph that is still to run need one of them (by
// way of detach(), say), it says so instead of computing with the new value.
void Reducer::settle(Bucket& bucket) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < bucket.members().size(); ++i) {
    const std::size_t parameter = bucket.members()[i];
    if (used_.empty() || used_[parameter]) {
      bucket.give_back(i);
    } else if (saved_[parameter].defined()) {
      bucket.slot(i).copy_(saved_[parameter]);
    }
    if (optimizers_.empty()) continue;
    optimizers_[parameter]->step();
    bump_version(bucket.parameter(i));
  }
  bucket.settled = true;
}

void Reducer::launch_complete() {
  while (next_ < buckets_.size() && buckets_[next_].pending == 0) launch(buckets_[next_++]);
}

void Reducer::launch(Bucket& bucket) {
  const torch::NoGradGuard no_grad;
  communicated_ = true;
  const bool async = overlap_ == Overlap::thread;
  const auto launched = Stopwatch::Clock::now();
  scale(bucket);
  if (hook_) {
    GradBucket given = bucket.for_hook();
    CommContext comm(group_, async);
    bucket.work = hook_(given, comm);
  } else if (async) {
    bucket.work = group_->all_reduce(bucket.buffer(), ReduceOp::avg, {.async_op = true});
  } else {
    group_->all_reduce(bucket.buffer(), ReduceOp::avg);
  }
  bucket.launched = true;
  bucket.launched_at = launched;
  const bool settle_now = !optimizers_.empty() && !asks_who_is_used();
  if (bucket.work.valid()) {
    bucket.ended_at = std::make_shared<std::atomic<Stopwatch::Clock::rep>>(0);
    bucket.claimed = settle_now ? std::make_shared<std::atomic<bool>>(false) : nullptr;
    bucket.work =
        bucket.work.then([this, &bucket, claim = bucket.claimed, ended = bucket.ended_at, memory = bucket.flat()] {
          ended->store(Stopwatch::Clock::now().time_since_epoch().count(), std::memory_order_release);
          if (claim && !claim->exchange(true)) settle(bucket);
        });
    return;
  }
  const auto now = Stopwatch::Clock::now();
  watch_.communicated(launched, now);
  watch_.waited(now - launched);
  if (settle_now) settle(bucket);
}

// With w ranks' weights and n ranks, multiplying by w n / (sum of w) makes the plain average the weighted one. A rank that
// shadows has weight 0 and gradients of zero. By n / (active ranks) the average becomes that over the active ones.
void Reducer::scale(Bucket& bucket) {
  if (!factor_ && options_.average == Average::samples) {
    double sum = shadowing_ ? 0 : weight_;
    group_->all_reduce(buffer_of(sum));
    if (sum <= 0) fail("the weights of all ranks are zero; call set_weight with the number of samples");
    factor_ = weight_ * group_->size() / sum;
  }
  if (!factor_) {
    const bool by_active = join_ && !join_->divide_by_initial_world_size && active_ < group_->size();
    factor_ = by_active ? static_cast<double>(group_->size()) / active_ : 1.0;
  }
  if (shadowing_ || *factor_ == 1.0) return;
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
