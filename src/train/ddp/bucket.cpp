#include "train/ddp/bucket.h"

#include <algorithm>
#include <map>

#include <ATen/Parallel.h>

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "comm/base/host.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"

namespace maniple {
namespace {

struct Open {
  PlannedBucket bucket;
  std::size_t payload = 0;  // bytes, excluding padding
  std::size_t last = 0;     // the last member's place in the order
  bool first = true;
};

}  // namespace

std::vector<PlannedBucket> plan_buckets(std::span<const PlannedParameter> parameters,
                                        std::span<const std::size_t> order, const BucketLimits& limits) {
  std::map<int, Open> open;
  std::vector<std::pair<std::size_t, PlannedBucket>> closed;
  const auto close = [&](Open& one) {
    closed.emplace_back(one.last, std::move(one.bucket));
    one = Open{{}, 0, 0, false};
  };
  for (std::size_t place = 0; place < order.size(); ++place) {
    const PlannedParameter& parameter = parameters[order[place]];
    Open& one = open[parameter.kind];
    if (one.bucket.members.empty()) one.bucket.layout = PackedLayout(parameter.element_bytes);
    one.bucket.members.push_back(order[place]);
    one.bucket.layout.add(parameter.elements);
    one.payload += parameter.elements * parameter.element_bytes;
    one.last = place;
    if (static_cast<double>(one.payload) >= (one.first ? limits.first_bytes : limits.bytes)) close(one);
  }
  for (auto& [kind, one] : open) {
    if (!one.bucket.members.empty()) close(one);
  }
  std::sort(closed.begin(), closed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<PlannedBucket> result;
  for (auto& [last, bucket] : closed) result.push_back(std::move(bucket));
  return result;
}

Bucket::Bucket(int index, bool is_last, const PlannedBucket& plan, std::span<const Parameter> parameters,
               const RegisteredMemory& memory, std::size_t offset, bool gradients_live_here)
    : index_(index), is_last_(is_last), gradients_live_here_(gradients_live_here), members_(plan.members) {
  for (const std::size_t member : members_) {
    names_.push_back(parameters[member].name);
    parameters_.push_back(parameters[member].tensor);
  }
  const torch::Tensor& like = parameters_.front();
  flat_ = tensor_on(memory, offset, {static_cast<std::int64_t>(plan.layout.total())}, {1}, like.options());
  for (std::size_t i = 0; i < members_.size(); ++i)
    views_.push_back(plan.layout.view(memory, offset, i, parameters_[i]));
  const torch::Tensor reals = flat_.is_complex() ? torch::view_as_real(flat_) : flat_;
  buffer_ = {flat_.data_ptr(), static_cast<std::size_t>(reals.numel()),
             dtype_of(flat_, {"DistributedDataParallel", "gradient"}),
             device_of(flat_, {"DistributedDataParallel", "gradient"})};
}

GradBucket Bucket::for_hook() const { return GradBucket(flat_, index_, is_last_, parameters_, views_, names_); }

bool Bucket::lives_here(const torch::Tensor& gradient, std::size_t i) const {
  return gradient.data_ptr() == views_[i].data_ptr() && gradient.strides() == views_[i].strides();
}

void Bucket::copy_in(std::size_t i) {
  torch::Tensor& gradient = parameters_[i].mutable_grad();
  if (!gradient.defined()) {
    views_[i].zero_();
    return;
  }
  MANIPLE_REQUIRE(gradient.layout() == torch::kStrided,
                  "DistributedDataParallel: the gradient of {} is sparse, which is not supported; make "
                  "its embedding with sparse(false)",
                  names_[i]);
  MANIPLE_REQUIRE(gradient.scalar_type() == views_[i].scalar_type() && gradient.sizes() == views_[i].sizes() &&
                      gradient.device() == views_[i].device(),
                  "DistributedDataParallel: parameter {} has changed since the first backward (its gradient is {} [{}] "
                  "on {}, it was {} "
                  "[{}] on {}); convert the module before wrapping it",
                  names_[i], c10::toString(gradient.scalar_type()), joined(gradient.sizes()), gradient.device().str(),
                  c10::toString(views_[i].scalar_type()), joined(views_[i].sizes()), views_[i].device().str());
  if (lives_here(gradient, i)) return;
  if (!gradient.is_cpu()) return noted_.push_back(i);
  views_[i].copy_(gradient);
  if (gradients_live_here_) gradient = views_[i];
}

std::vector<torch::Tensor> Bucket::flush() {
  if (noted_.empty()) return {};
  std::vector<torch::Tensor> to, from;
  for (const std::size_t i : noted_) {
    torch::Tensor& gradient = parameters_[i].mutable_grad();
    if (lives_here(gradient, i)) continue;  // noted twice: a copy onto itself would race with the first copy
    to.push_back(views_[i]);
    from.push_back(gradient);
    if (gradients_live_here_) gradient = views_[i];
  }
  noted_.clear();
  if (!from.empty()) copy_all(to, from);
  return from;
}

void Bucket::copy_out(std::size_t i) const {
  torch::Tensor& gradient = parameters_[i].mutable_grad();
  if (gradients_live_here_) {
    if (!gradient.defined() || !lives_here(gradient, i)) gradient = views_[i];
  } else if (gradient.defined()) {
    gradient.copy_(views_[i]);
  } else {
    gradient = views_[i].clone();
  }
}

void Bucket::drop_gradients() {
  for (torch::Tensor& parameter : parameters_) parameter.mutable_grad() = torch::Tensor();
}

torch::Tensor Bucket::saved(std::size_t i) const {
  const torch::Tensor gradient = parameters_[i].grad();
  return gradient.defined() && gradients_live_here_ ? gradient.clone() : torch::Tensor();
}

Overlap choose_overlap(const OverlapFacts& facts) noexcept {
  constexpr std::size_t kWorthWaking = 2 * 1024 * 1024;
  if (facts.hosts > 1) return Overlap::thread;
  const bool spare_cores = facts.cores >= 2 * facts.threads;
  return spare_cores && facts.gradient_bytes >= kWorthWaking ? Overlap::thread : Overlap::none;
}

Overlap resolve_overlap(Overlap requested, ProcessGroup& group, std::size_t gradient_bytes) {
  if (requested != Overlap::automatic) return requested;
  OverlapFacts facts{.hosts = group.topology().node_count(), .gradient_bytes = gradient_bytes};
  if (facts.hosts == 1 && group.size() > 1) {
    // A launcher binds each rank to its own cores, so the number of cores is the size of the union.
    ByteWriter mine;
    mine.put(static_cast<std::int32_t>(at::get_num_threads()));
    mine.put_string(CoreSet::of_this_process().physical().encode());
    CoreSet cores;
    facts.threads = 0;
    for (const std::string& answer : group.all_gather_objects(mine.take(), {}, public_place())) {
      ByteReader reader(answer);
      facts.threads += reader.get<std::int32_t>();
      cores.add(CoreSet::decode(reader.get_string(CoreSet::kMostCores / 8)));
    }
    facts.cores = cores.count();
  }
  return choose_overlap(facts);
}

}  // namespace maniple
