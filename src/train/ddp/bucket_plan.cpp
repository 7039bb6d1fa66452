#include "train/ddp/bucket_plan.h"

#include <algorithm>
#include <map>

namespace maniple {
namespace {

struct Open {
  PlannedBucket bucket;
  std::size_t payload = 0;  // bytes without padding
  std::size_t last = 0;     // place in the order of its last member
  bool first = true;
};

std::size_t padded(std::size_t elements, std::size_t element_bytes) {
  const std::size_t step = std::max<std::size_t>(1, kGradientAlignment / element_bytes);
  return (elements + step - 1) / step * step;
}

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
    one.bucket.kind = parameter.kind;
    one.bucket.members.push_back(order[place]);
    one.bucket.offsets.push_back(one.bucket.elements);
    one.bucket.elements += padded(parameter.elements, parameter.element_bytes);
    one.bucket.bytes = one.bucket.elements * parameter.element_bytes;
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

}  // namespace maniple
