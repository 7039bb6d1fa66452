// The course of a bucket: it is laid out, launched, waited for and finalized.
#include <map>

#include "comm/base/check.h"
#include "train/ddp/reducer.h"
#include "train/tensor/public_call.h"

namespace maniple::detail {
namespace {

double bytes_of_mb(double mb) { return mb * 1024 * 1024; }

}  // namespace

// Assigns gradients to buckets and orders the buckets, at the end of the first backward: see bucket.h. All ranks use
// the order in which gradients became ready on rank 0 (with uneven inputs, on the first active rank). Parameters
// without a gradient follow in the reverse order of registration, in which most modules would compute them. The delayed
// parameters come last.
void Reducer::lay_out() {
  std::vector<std::int64_t> order(ready_order_.begin(), ready_order_.end());
  for (const bool delayed : {false, true}) {
    for (std::size_t i = parameters_.size(); i-- > 0;) {
      const Parameter& parameter = parameters_[i];
      if (parameter.delayed == delayed && (delayed || !parameter.ready()))
        order.push_back(static_cast<std::int64_t>(i));
    }
  }
  begin_to_average();
  group_->broadcast(buffer_of(order), active_.first(), {}, public_place());

  std::vector<PlannedParameter> sizes;
  for (const Parameter& parameter : parameters_) {
    const int device = parameter.device.is_cpu() ? 0 : 1 + parameter.device.index();
    sizes.push_back(
        {static_cast<std::size_t>(parameter.tensor.numel()), static_cast<std::size_t>(parameter.tensor.element_size()),
         2 * (static_cast<int>(parameter.tensor.scalar_type()) + 128 * device) + (parameter.delayed ? 1 : 0)});
  }
  const std::vector<std::size_t> places(order.begin(), order.end());
  const auto plans =
      plan_buckets(sizes, places, {bytes_of_mb(options_.first_bucket_mb), bytes_of_mb(options_.bucket_cap_mb)});
  // One block of memory for all buckets of a device.
  struct Memory {
    PackedLayout layout = {};
    RegisteredMemory memory = {};
    std::size_t used = 0;  // buckets placed so far
  };
  std::map<std::pair<DeviceType, int>, Memory> memories;
  const auto memory_of = [&](const PlannedBucket& plan) -> Memory& {
    const torch::Device device = parameters_[plan.members.front()].device;
    return memories[{device.is_cpu() ? DeviceType::cpu : DeviceType::cuda, device.is_cpu() ? 0 : device.index()}];
  };
  for (const PlannedBucket& plan : plans) memory_of(plan).layout.add(plan.layout.bytes());
  for (auto& [device, one] : memories) {
    one.memory = allocate_for(*group_, std::max<std::size_t>(one.layout.bytes(), 1),
                              {device.first, static_cast<std::int16_t>(device.second)});
  }

  std::vector<Bucket> buckets;
  for (std::size_t b = 0; b < plans.size(); ++b) {
    Memory& memory = memory_of(plans[b]);
    buckets.emplace_back(static_cast<int>(b), b + 1 == plans.size(), plans[b], parameters_, memory.memory,
                         memory.layout.offset(memory.used++), options_.gradient_as_bucket_view);
    for (std::size_t i = 0; i < plans[b].members.size(); ++i) {
      Parameter& parameter = parameters_[plans[b].members[i]];
      parameter.bucket = b;
      parameter.place = i;
    }
  }
  for (const Parameter& parameter : parameters_) {
    if (parameter.ready()) buckets[parameter.bucket].copy_in(parameter.place);
  }
  buckets_ = std::move(buckets);
}

// Handles a gradient that this rank has not computed. If there is none, it counts as zero. Otherwise it keeps what
// earlier backwards left: either their average, which averaging does not change, or a sum accumulated under no_sync,
// which still has to be averaged. If no rank has computed the gradient, the old value is put back unchanged.
void Reducer::copy_in_absent(Parameter& parameter) {
  const torch::NoGradGuard no_grad;
  Bucket& bucket = buckets_[parameter.bucket];
  parameter.saved = bucket.saved(parameter.place);
  bucket.copy_in(parameter.place);
}

// A shadowing rank adds nothing to any gradient. Gradients that no rank uses keep their old values.
void Reducer::copy_in_zeros(Parameter& parameter) {
  Bucket& bucket = buckets_[parameter.bucket];
  if (options_.static_graph || options_.find_unused_parameters) parameter.saved = bucket.saved(parameter.place);
  bucket.view(parameter.place).zero_();
}

void Reducer::average_all() {
  for (Parameter& parameter : parameters_) {
    if (shadows()) {
      copy_in_zeros(parameter);
    } else if (!parameter.ready() && parameter.expected) {
      copy_in_absent(parameter);
    } else if (parameter.delayed && !buckets_[parameter.bucket].launched) {
      buckets_[parameter.bucket].copy_in(parameter.place);
    }
  }
  for (Bucket& bucket : buckets_) bucket.pending = 0;
  launch_complete();

  if (exchanges_used()) {
    exchange_used(*group_, parameters_, used_here());
    if (options_.static_graph) learn_graph();
  }
  for (Bucket& bucket : buckets_) {
    wait_for(bucket);
    if (!tree_) continue;
    const auto from = Stopwatch::Clock::now();
    tree_->finish(bucket);
    const auto now = Stopwatch::Clock::now();
    watch_.communicated(from, now);
    watch_.waited(now - from);
  }
  side_.join();
  for (Bucket& bucket : buckets_) {
    if (!bucket.finalized) finalize(bucket);
  }
}

// A shadowing rank learns nothing. If all ranks are active, none is shadowing.
void Reducer::learn_graph() {
  if (graph_ == Graph::unknown && !shadows()) {
    for (Parameter& parameter : parameters_) parameter.expected = parameter.ready();
    graph_ = Graph::own;
  }
  if (active_.all()) graph_ = Graph::shared;
}

// bump_version: if a part of the graph that has yet to run needs a stepped parameter (by way of detach(), say),
// autograd reports that instead of computing with the new value.
void Reducer::finalize(Bucket& bucket) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < bucket.members().size(); ++i) {
    const Parameter& parameter = parameters_[bucket.members()[i]];
    if (parameter.used) {
      bucket.copy_out(i);
    } else if (parameter.saved.defined()) {
      bucket.view(i).copy_(parameter.saved);
    }
    if (!steps_in_backward_) continue;
    parameter.optimizer->step();
    bump_version(parameter.tensor);
  }
  bucket.finalized = true;
}

void Reducer::launch_complete() {
  while (next_ < buckets_.size() && buckets_[next_].pending == 0) launch(buckets_[next_++]);
}

// On a GPU the host does not wait. The average, and the steps after it if DDP takes them, run on a separate stream
// concurrently with backward.
void Reducer::launch_on_device(Bucket& bucket) {
  const Device device = bucket.buffer().device;
  side_.run(device, [&] {
    if (std::vector<torch::Tensor> read = bucket.flush(); !read.empty()) side_.keep(device, std::move(read));
    scale(bucket);
    if (hook_) {
      GradBucket given = bucket.for_hook();
      CommContext comm(group_, false);
      if (const Work work = hook_(given, comm); work.valid()) work.wait();
    } else {
      group_->all_reduce(bucket.buffer(), ReduceOp::avg, {.stream = current_stream_on(device)}, public_place());
    }
    if (steps_in_backward_ && !exchanges_used()) finalize(bucket);
  });
  bucket.launched = true;
}

void Reducer::launch(Bucket& bucket) {
  const torch::NoGradGuard no_grad;
  begin_to_average();
  if (!bucket.buffer().device.is_cpu()) return launch_on_device(bucket);
  const bool async = overlap_ == Overlap::thread;
  const auto launched = Stopwatch::Clock::now();
  scale(bucket);
  if (hook_) {
    GradBucket given = bucket.for_hook();
    CommContext comm(group_, async);
    bucket.work = hook_(given, comm);
  } else if (tree_) {
    bucket.work = tree_->launch(bucket, async);
  } else if (async) {
    bucket.work = group_->all_reduce(bucket.buffer(), ReduceOp::avg, {.async_op = true}, public_place());
  } else {
    group_->all_reduce(bucket.buffer(), ReduceOp::avg, {}, public_place());
  }
  bucket.launched = true;
  bucket.launched_at = launched;
  const bool finalize_now = steps_in_backward_ && !exchanges_used();
  if (bucket.work.valid()) {
    bucket.ended_at = std::make_shared<std::atomic<Stopwatch::Clock::rep>>(0);
    bucket.claimed = finalize_now ? std::make_shared<std::atomic<bool>>(false) : nullptr;
    bucket.work =
        bucket.work.then([this, &bucket, claim = bucket.claimed, ended = bucket.ended_at, memory = bucket.flat()] {
          ended->store(Stopwatch::Clock::now().time_since_epoch().count(), std::memory_order_release);
          if (claim && !claim->exchange(true)) finalize(bucket);
        });
    return;
  }
  const auto now = Stopwatch::Clock::now();
  watch_.communicated(launched, now);
  watch_.waited(now - launched);
  if (finalize_now) finalize(bucket);
}

// With rank weight w and n ranks, multiplying by w n / (sum of w) turns the plain average into the weighted one. A
// shadowing rank has weight 0 and zero gradients.
void Reducer::scale(Bucket& bucket) {
  if (!factor_ && options_.average == Average::samples) {
    double sum = shadows() ? 0 : weight_;
    group_->all_reduce(buffer_of(sum), ReduceOp::sum, {}, public_place());
    if (sum <= 0) fail("the weights of all ranks are zero; call set_weight with the number of samples");
    factor_ = weight_ * group_->size() / sum;
  }
  if (!factor_) factor_ = active_.gradient_factor();
  if (shadows() || *factor_ == 1.0) return;
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

}  // namespace maniple::detail
