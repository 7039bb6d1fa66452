// The gradients of a unit: averages whole gradients and keeps this rank's rows.
#include <algorithm>
#include <cstring>
#include <map>

#include "comm/base/check.h"
#include "train/fully_sharded/unit.h"

namespace maniple::detail {
namespace {

using torch::Tensor;

/// Small, so that every dtype represents it exactly. If ranks have different tags, their average differs from the tag
/// of at least one rank.
double tag_of(int number) { return 1 + number % 61; }

}  // namespace

torch::ScalarType ShardUnit::reduced_dtype(const Tensor& parameter) const {
  const MixedPrecision& precision = options_.mixed_precision;
  return precision.reduce_dtype.value_or(precision.param_dtype.value_or(parameter.scalar_type()));
}

std::vector<ShardUnit::ReduceLayout> ShardUnit::reduce_layouts(const std::vector<std::size_t>& which) const {
  std::map<torch::ScalarType, std::vector<std::size_t>> by_dtype;
  for (const std::size_t i : which) by_dtype[reduced_dtype(parameters_[i].shard)].push_back(i);
  std::vector<ReduceLayout> layouts;
  std::vector<PackedLayout::Rows> rows;
  for (auto& [dtype, members] : by_dtype) {
    rows.clear();
    for (const std::size_t i : members) rows.push_back({parameters_[i].rows, parameters_[i].row_elements});
    auto packed = PackedLayout::by_rows(c10::elementSize(dtype), 1 + members.size(), rows, options_.group->size());
    layouts.push_back({dtype, std::move(members), std::move(packed)});
  }
  return layouts;
}

std::vector<std::size_t> ShardUnit::trained() const {
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].parameter.requires_grad()) which.push_back(i);
  }
  return which;
}

std::size_t ShardUnit::reduce_bytes() const {
  std::size_t most = 0;
  for (const ReduceLayout& layout : reduce_layouts(trained())) most = std::max(most, layout.packed.bytes());
  return most;
}

// ---- Gradients inside no_sync --------------------------------------------------------------------------------------

// zero_grad() sets `grad` to none or zeroes it. All ranks decide alike, because even an empty tensor has a version.
bool ShardUnit::keeps_accumulated(ShardedParameter& one) {
  if (!one.accumulated.defined()) return false;
  const Tensor& gradient = one.parameter.grad();
  const bool same = gradient.defined() && gradient.is_same(one.mark);
  if (same && static_cast<std::uint32_t>(gradient._version()) == one.mark_version) return true;
  if (gradient.defined() && gradient.any().item<bool>())
    fail(format_text(
        "the gradient of {} was changed while gradients of backwards inside no_sync() wait to be averaged; "
        "clip, scale or replace gradients after the backward outside no_sync(), or drop them by zero_grad()",
        one.name()));
  drop_accumulated(one);
  return false;
}

// Uses variable_data(): zero_grad() detaches the gradient, which is impossible for a view in autograd's sense.
void ShardUnit::mark_accumulated(ShardedParameter& one) {
  Tensor& gradient = one.parameter.mutable_grad();
  one.mark_is_ours = !gradient.defined();
  if (one.mark_is_ours) {
    const Tensor rows = one.accumulated.dim() == 0 ? one.accumulated.reshape({1}) : one.accumulated;
    gradient = rows.narrow(0, one.own.begin, one.own.count).to(one.shard.scalar_type()).variable_data();
  }
  one.mark = gradient;
  one.mark_version = static_cast<std::uint32_t>(gradient._version());
}

void ShardUnit::drop_accumulated(ShardedParameter& one) noexcept {
  one.accumulated = Tensor();
  if (one.mark_is_ours && one.parameter.grad().is_same(one.mark)) one.parameter.mutable_grad() = Tensor();
  one.mark = Tensor();
  one.mark_is_ours = false;
}

void ShardUnit::accumulate(const std::vector<std::size_t>& which, std::vector<Tensor> gradients) {
  const torch::NoGradGuard no_grad;
  context_->finish_reducing();  // which writes to `grad`
  for (std::size_t k = 0; k < which.size(); ++k) {
    if (!gradients[k].defined()) continue;
    ShardedParameter& one = parameters_[which[k]];
    if (gradients[k].layout() != torch::kStrided)
      fail(format_text("the gradient of {} is sparse, which is not supported; make its embedding with sparse(false)",
                       one.name()));
    if (keeps_accumulated(one)) {
      one.accumulated.add_(gradients[k]);
      if (one.mark_is_ours && one.mark.scalar_type() != one.accumulated.scalar_type()) {  // a copy
        one.parameter.mutable_grad() = Tensor();
        mark_accumulated(one);
      }
    } else {
      one.accumulated = gradients[k].to(reduced_dtype(one.shard), /*non_blocking=*/false, /*copy=*/true).contiguous();
      mark_accumulated(one);
    }
    gradients[k] = Tensor();
  }
}

bool ShardUnit::has_accumulated() {
  const torch::NoGradGuard no_grad;
  bool any = false;
  for (ShardedParameter& one : parameters_) any = keeps_accumulated(one) || any;
  return any;
}

// ---- Averages ------------------------------------------------------------------------------------------------------

// Gradients accumulated without synchronisation count as part of this gradient.
void ShardUnit::reduce(const std::vector<std::size_t>& which, std::vector<Tensor> gradients) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> all(parameters_.size());
  std::vector<std::size_t> members = which;
  used_here_.assign(parameters_.size(), false);
  for (std::size_t k = 0; k < which.size(); ++k) all[which[k]] = std::move(gradients[k]);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& one = parameters_[i];
    if (keeps_accumulated(one)) {
      if (std::find(which.begin(), which.end(), i) == which.end())
        fail(format_text(
            "requires_grad of parameter {} was true in a backward inside no_sync() and is false now; freeze "
            "it after the backward outside, which averages its gradient",
            one.name()));
      if (all[i].defined()) one.accumulated.add_(all[i]);
      all[i] = one.accumulated;
      drop_accumulated(one);
    }
    used_here_[i] = all[i].defined();
    if (used_here_[i] && all[i].layout() != torch::kStrided)
      fail(format_text("the gradient of {} is sparse, which is not supported; make its embedding with sparse(false)",
                       one.name()));
  }
  waiting = false;
  context_->reached(family);
  for (const ReduceLayout& layout : reduce_layouts(members)) {
    context_->finish_reducing();
    start_reduce(layout, all);
    for (const std::size_t i : layout.members) all[i] = Tensor();
    reducing_ = layout;
    context_->reducing(this);
    if (!context_->asynchronous(device_)) context_->finish_reducing();
  }
}

void ShardUnit::start_reduce(const ReduceLayout& layout, const std::vector<Tensor>& gradients) {
  const PackedLayout& packed = layout.packed;
  const std::size_t element_bytes = packed.element_bytes();
  const RegisteredMemory& memory = context_->scratch(ShardContext::Use::reduce, packed.bytes(), device_);
  const auto options = torch::TensorOptions().dtype(layout.dtype).device(device_);
  // Made on the device: a copy from the host would block the host until the stream's earlier work is done.
  const auto heads = static_cast<std::int64_t>(1 + layout.members.size());
  const Tensor head = torch::ones({heads}, options);
  head.narrow(0, 0, 1).fill_(tag_of(number_));
  for (std::int64_t m = 1; m < heads; ++m) {
    if (!used_here_[layout.members[m - 1]]) head.narrow(0, m, 1).zero_();
  }
  std::vector<Tensor> to, from;
  auto* scratch = static_cast<std::byte*>(memory.data());
  for (int rank = 0; rank < group().size(); ++rank) {
    to.push_back(torch::from_blob(scratch + packed.part_begin(rank) * element_bytes, head.sizes(), options));
    from.push_back(head);
    for (std::size_t m = 0; m < layout.members.size(); ++m) {
      const PackedLayout::Piece piece = packed.piece(rank, m);
      if (piece.count == 0) continue;
      std::byte* place = scratch + piece.offset * element_bytes;
      const std::size_t bytes = piece.count * element_bytes;
      const Tensor& gradient = gradients[layout.members[m]];
      if (!gradient.defined() && device_.is_cpu()) {
        std::memset(place, 0, bytes);
      } else if (!gradient.defined()) {
        torch::from_blob(place, {static_cast<std::int64_t>(piece.count)}, options).zero_();
      } else if (device_.is_cpu() && gradient.is_contiguous() && gradient.scalar_type() == layout.dtype) {
        std::memcpy(place, static_cast<const std::byte*>(gradient.data_ptr()) + piece.begin * element_bytes, bytes);
      } else {
        const RowRange rows = rows_of(parameters_[layout.members[m]].rows, group().size(), rank);
        const Tensor cut = gradient.dim() == 0 ? gradient.reshape({1}) : gradient.narrow(0, rows.begin, rows.count);
        to.push_back(torch::from_blob(place, cut.sizes(), options));
        from.push_back(cut);
      }
    }
  }
  copy_all(to, from);

  const Device device = device_for(device_);
  const std::size_t rank = group().rank();
  std::byte* own = scratch + packed.part_begin(rank) * element_bytes;
  const DType dtype = dtype_of(head, {"fully_shard", "gradient"});
  context_->start(ShardContext::Use::reduce, device_, [&](const CallOptions& call) {
    const Buffer part_here{own, packed.part_counts()[rank], dtype, device};
    Work work = group().reduce_scatter(ConstBuffer{scratch, packed.total(), dtype, device}, part_here, ReduceOp::avg,
                                       packed.part_counts(), call, call.where);
    if (!options_.replicate_group) return work;
    const auto over_replicas = [replicas = options_.replicate_group, part_here, stream = call.stream,
                                where = call.where] {
      replicas->all_reduce(part_here, ReduceOp::avg, {.stream = stream}, where);
    };
    if (call.async_op) return work.then(over_replicas);
    over_replicas();
    return work;
  });
}

void ShardUnit::finish_reduce() {
  if (!reducing_) return;
  const torch::NoGradGuard no_grad;
  context_->wait(ShardContext::Use::reduce, device_);
  const ReduceLayout layout = std::move(*reducing_);
  reducing_.reset();
  const std::size_t rank = group().rank();
  const PackedLayout& packed = layout.packed;
  const std::size_t element_bytes = packed.element_bytes();
  auto* scratch = static_cast<std::byte*>(context_->scratch(ShardContext::Use::reduce, packed.bytes(), device_).data());
  const auto options = torch::TensorOptions().dtype(layout.dtype).device(device_);
  const auto heads = static_cast<std::int64_t>(1 + layout.members.size());
  // A parameter used on this rank counts as used. If this holds for all, the host does not wait for the GPU to read the
  // flags.
  Tensor head;
  const bool all_used =
      std::all_of(layout.members.begin(), layout.members.end(), [&](std::size_t i) { return used_here_[i]; });
  if (device_.is_cpu() || !all_used) {
    head = torch::from_blob(scratch + packed.part_begin(rank) * element_bytes, {heads}, options)
               .to(torch::kCPU, torch::kFloat64);
    const double tag = head[0].item<double>();
    if (std::abs(tag - tag_of(number_)) > 0.4)  // if tags differ, at least one rank's is farther away
      fail(
          "other ranks average the gradients of another unit meanwhile; all ranks call the same units in the same "
          "order, in forward and in backward");
  }
  for (std::size_t m = 0; m < layout.members.size(); ++m) {
    ShardedParameter& one = parameters_[layout.members[m]];
    const bool used = used_here_[layout.members[m]] || head[static_cast<std::int64_t>(m + 1)].item<double>() > 0;
    if (!used) continue;
    Tensor& gradient = one.parameter.mutable_grad();
    std::byte* place = scratch + packed.piece(rank, m).offset * element_bytes;
    const Tensor rows = one.shard.numel() == 0 ? torch::empty(one.shard.sizes(), options)
                                               : torch::from_blob(place, one.shard.sizes(), options);
    if (gradient.defined()) {
      gradient.add_(rows);
    } else {
      gradient = rows.to(one.shard.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  }
}

void ShardUnit::forget_gradients() noexcept {
  reducing_.reset();
  for (ShardedParameter& one : parameters_) drop_accumulated(one);
}

}  // namespace maniple::detail
