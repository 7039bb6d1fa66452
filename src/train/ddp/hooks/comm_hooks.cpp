// The plain communication hooks, and the table of all hooks. To add a hook, add a file in this folder and a row in the
// table.
#include <maniple/train/comm_hooks.h>

#include "comm/base/check.h"
#include "train/ddp/hooks/hook_parts.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>
#include <maniple/train/int8_hook.h>
#include <maniple/train/power_sgd.h>

namespace maniple {

Work CommContext::all_reduce(const torch::Tensor& tensor, ReduceOp op) const {
  const Staged staged(tensor, Access::read_write, {"all_reduce", "tensor"});
  if (async_)
    return group_->all_reduce(staged.buffer(), op, {.async_op = true}, public_place()).then([staged] {
      staged.write_back();
    });
  group_->all_reduce(staged.buffer(), op, {.stream = current_stream_on(staged.buffer().device)}, public_place());
  staged.write_back();
  return {};
}

Work CommContext::then(const Work& work, std::function<void()> next) const {
  const auto without_grad = [next = std::move(next)] {
    const torch::NoGradGuard no_grad;
    next();
  };
  if (work.valid()) return work.then(without_grad);
  without_grad();
  return {};
}

namespace {

// Each rank rounds its gradient to the short type. The group adds in float32, divides, and rounds once; the result is
// widened again. Gradients that already have a short type are averaged unchanged. Cost: half the bytes (a quarter for
// float64), two passes over the bucket.
CommHook compress_to(torch::ScalarType short_type) {
  return [short_type](GradBucket& bucket, CommContext& comm) {
    const torch::Tensor buffer = bucket.buffer();
    const bool pays = buffer.scalar_type() == torch::kFloat32 || buffer.scalar_type() == torch::kFloat64;
    if (!pays) return comm.all_reduce(buffer, ReduceOp::avg);
    const torch::Tensor rounded = buffer.to(short_type);
    return comm.then(comm.all_reduce(rounded, ReduceOp::avg), [buffer, rounded] { buffer.copy_(rounded); });
  };
}

}  // namespace

CommHook fp16_compress_hook() { return compress_to(torch::kFloat16); }
CommHook bf16_compress_hook() { return compress_to(torch::kBFloat16); }

CommHook allreduce_hook() {
  return [](GradBucket& bucket, CommContext& comm) { return comm.all_reduce(bucket.buffer(), ReduceOp::avg); };
}

std::span<const NamedCommHook> comm_hooks() noexcept {
  static constexpr NamedCommHook kHooks[] = {
      {"all_reduce", "the average as it is", allreduce_hook},
      {"fp16", "gradients travel as float16", fp16_compress_hook},
      {"bf16", "gradients travel as bfloat16", bf16_compress_hook},
      {"int8", "gradients travel as 8-bit integers", [] { return int8_quantize_hook(std::make_shared<Int8State>()); }},
      {"powerSGD", "gradients travel as products of thin matrices",
       [] { return powerSGD_hook(std::make_shared<PowerSGDState>()); }},
  };
  return kHooks;
}

CommHook comm_hook_named(std::string_view name) {
  std::string known;
  for (const NamedCommHook& hook : comm_hooks()) {
    if (name == hook.name) return hook.make();
    known += format_text("{}{}", known.empty() ? "" : ", ", hook.name);
  }
  throw InvalidArgument(format_text("no communication hook \"{}\"; there are {}", name, known));
}

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
  one.flat = torch::zeros({bucket.buffer().numel()}, bucket.buffer().options().dtype(dtype));
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
  const PublicCall call("average_errors, which all ranks call");
  for (auto& [index, one] : buckets_) {
    const Staged staged(one.flat, Access::read_write, {"average_errors", "error"});
    group.all_reduce(staged.buffer(), ReduceOp::avg, {.stream = current_stream_on(staged.buffer().device)},
                     public_place());
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
