#include "train/ddp/hooks/hook_state.h"

#include "base/check.h"
#include <maniple/dist.h>

namespace maniple {

torch::Tensor part_of(const torch::Tensor& flat, const GradBucket& bucket, std::size_t i) {
  const torch::Tensor& gradient = bucket.gradients()[i];
  const torch::Tensor& buffer = bucket.buffer();
  if (gradient.numel() == 0) return flat.narrow(0, 0, 0).view(gradient.sizes());
  const auto bytes =
      static_cast<const std::byte*>(gradient.data_ptr()) - static_cast<const std::byte*>(buffer.data_ptr());
  return flat.as_strided(gradient.sizes(), gradient.strides(),
                         flat.storage_offset() + bytes / static_cast<std::int64_t>(buffer.element_size()));
}

torch::Tensor& ErrorFeedback::of(const GradBucket& bucket, torch::ScalarType dtype) {
  One& one = buckets_[bucket.index()];
  if (one.flat.defined()) return one.flat;
  one.flat = torch::zeros({bucket.buffer().numel()}, torch::TensorOptions(dtype));
  for (std::size_t i = 0; i < bucket.names().size(); ++i) {
    const std::string& name = bucket.names()[i];
    one.parts.emplace_back(name, part_of(one.flat, bucket, i));
    const auto loaded = loaded_.find(name);
    if (loaded == loaded_.end()) continue;
    MANIPLE_REQUIRE(
        loaded->second.sizes() == one.parts.back().second.sizes(),
        "the state of a communication hook has an error of shape [{}] for parameter {}, whose shape is [{}]; "
        "load the state that was saved with this model",
        joined(loaded->second.sizes()), name, joined(one.parts.back().second.sizes()));
    one.parts.back().second.copy_(loaded->second);
    loaded_.erase(loaded);
  }
  return one.flat;
}

void ErrorFeedback::average(ProcessGroup& group) {
  std::vector<torch::Tensor> all;
  for (auto& [index, one] : buckets_) all.push_back(one.flat);
  if (all.empty()) return;
  for (const torch::Tensor& flat : all) {
    group.all_reduce(Buffer{flat.data_ptr(), static_cast<std::size_t>(flat.numel()),
                            flat.scalar_type() == torch::kFloat64 ? DType::float64 : DType::float32},
                     ReduceOp::avg);
  }
}

ErrorFeedback::Named ErrorFeedback::copies() const {
  Named result = loaded_;
  for (const auto& [index, one] : buckets_) {
    for (const auto& [name, part] : one.parts) result[name] = part.clone(torch::MemoryFormat::Contiguous);
  }
  return result;
}

void ErrorFeedback::load(Named named) {
  buckets_.clear();
  loaded_ = std::move(named);
}

}  // namespace maniple
