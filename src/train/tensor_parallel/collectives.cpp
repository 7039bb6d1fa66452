// Collectives as autograd functions. Each has one communication for forward and one for backward, which are transposes
// of each other.
#include <algorithm>
#include <atomic>

#include "comm/base/check.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include <maniple/dist.h>
#include <maniple/train/tensor_parallel.h>

namespace maniple {
namespace {

using torch::Tensor;

enum class Move : std::int64_t { none, sum, gather, slice, sum_and_slice };

struct TensorGroup : torch::CustomClassHolder {
  explicit TensorGroup(std::shared_ptr<ProcessGroup> held) : group(std::move(held)) {}
  std::shared_ptr<ProcessGroup> group;
};

std::shared_ptr<ProcessGroup> group_or_default(const std::shared_ptr<ProcessGroup>& group, const char* who) {
  auto found = group ? group : get_default_group();
  found->require_member(who);
  return found;
}

std::atomic<std::uint64_t> operations_done{0}, bytes_given{0};

/// Counts for tensor_parallel_statistics().
void note(const Tensor& input) {
  operations_done.fetch_add(1, std::memory_order_relaxed);
  bytes_given.fetch_add(input.nbytes(), std::memory_order_relaxed);
}

/// A rank's part of `x` along `dim`.
Tensor part_of(const Tensor& x, std::int64_t dim, int rank, int size) {
  const GroupShare share = group_share(x.size(dim), rank, size);
  return x.narrow(dim, share.begin, share.count).contiguous();
}

Tensor moved(Move move, const Tensor& x, std::int64_t dim, std::int64_t extent,
             const std::shared_ptr<ProcessGroup>& group) {
  const int rank = group->rank(), size = group->size();
  if (move != Move::none && move != Move::slice) note(x);
  switch (move) {
    case Move::none: return x;
    case Move::sum: {
      const Tensor sum = x.clone(torch::MemoryFormat::Contiguous);
      all_reduce(sum, ReduceOp::sum, {.group = group}, public_place());
      return sum;
    }
    case Move::gather: {
      std::vector<Tensor> parts;
      auto sizes = x.sizes().vec();
      for (int r = 0; r < size; ++r) {
        sizes[dim] = group_share(extent, r, size).count;
        parts.push_back(torch::empty(sizes, x.options()));
      }
      all_gather(parts, x.contiguous(), {.group = group}, public_place());
      return torch::cat(parts, dim);
    }
    case Move::slice: return part_of(x, dim, rank, size);
    case Move::sum_and_slice: {
      std::vector<Tensor> parts;
      for (int r = 0; r < size; ++r) parts.push_back(part_of(x, dim, r, size));
      const Tensor mine = torch::empty_like(parts[rank]);
      reduce_scatter(mine, parts, ReduceOp::sum, {.group = group}, public_place());
      return mine;
    }
  }
  return x;
}

/// If backward throws, the other ranks wait for this rank in a layer that it will not reach, and its next collective
/// would be matched with that layer.
void abort_group_if_backward_throws(const std::shared_ptr<ProcessGroup>& group) {
  IfBackwardThrows::call([group] {
    if (group->error()) return;
    try {
      group->abort(format_text(
          "backward failed on rank {} (its own output says why) in a tensor-parallel model; going on would mix the "
          "gradients of different layers. Make a new group, or start again from a checkpoint",
          group->rank()));
    } catch (...) {
      // No memory for the text: other ranks wait until their deadline.
    }
  });
}

std::shared_ptr<ProcessGroup> begin_backward(torch::autograd::AutogradContext* context) {
  if (torch::GradMode::is_enabled())
    throw Unsupported("tensor parallelism: backward with create_graph is not supported");
  auto group = c10::static_intrusive_pointer_cast<TensorGroup>(context->saved_data["group"].toCapsule())->group;
  abort_group_if_backward_throws(group);
  return group;
}

struct GroupMove : torch::autograd::Function<GroupMove> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, std::int64_t there,
                        std::int64_t back, std::int64_t dim, std::int64_t extent,
                        const std::shared_ptr<ProcessGroup>& group) {
    context->saved_data["back"] = back;
    context->saved_data["dim"] = dim;
    context->saved_data["extent"] = extent;
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<TensorGroup>(group));
    return moved(static_cast<Move>(there), x, dim, extent, group);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const PublicCall call("the backward of a tensor-parallel layer");
    const auto group = begin_backward(context);
    const auto back = static_cast<Move>(context->saved_data["back"].toInt());
    const Tensor gradient =
        moved(back, gradients[0], context->saved_data["dim"].toInt(), context->saved_data["extent"].toInt(), group);
    return {gradient, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor apply(const char* who, Move there, Move back, const Tensor& x, std::int64_t dim, std::int64_t extent,
             const std::shared_ptr<ProcessGroup>& given) {
  const auto group = group_or_default(given, who);
  if (group->size() == 1) return x;
  const PublicCall call(who);
  const bool divides = there == Move::slice || there == Move::sum_and_slice, joins = there == Move::gather;
  if (divides || joins) {
    MANIPLE_REQUIRE(dim >= -x.dim() && dim < x.dim(), "{}: dimension {} of a tensor of [{}]", who, dim,
                    joined(x.sizes()));
    if (dim < 0) dim += x.dim();
  }
  if (divides) {
    extent = x.size(dim);
    MANIPLE_REQUIRE(extent >= group->size(), "{}: dimension {} of [{}] cannot be divided over {} ranks", who, dim,
                    joined(x.sizes()), group->size());
  }
  if (joins) {
    if (extent == 0) extent = x.size(dim) * group->size();
    const GroupShare mine = group_share(extent, group->rank(), group->size());
    MANIPLE_REQUIRE(mine.count == x.size(dim), "{}: rank {} of {} has {} of {} in dimension {}; its share is {}", who,
                    group->rank(), group->size(), x.size(dim), extent, dim, mine.count);
  }
  return GroupMove::apply(x, static_cast<std::int64_t>(there), static_cast<std::int64_t>(back), dim, extent, group);
}

/// The loss of each sample. Logits are float32 or float64, [samples, this rank's share]. Targets are relative to the
/// beginning of the share; targets in other ranks' shares lie outside its range.
struct DividedCrossEntropy : torch::autograd::Function<DividedCrossEntropy> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& logits, const Tensor& targets,
                        const std::shared_ptr<ProcessGroup>& group) {
    const DistOptions with{.group = group};
    const SourceLocation place = public_place();
    const Tensor largest = std::get<0>(logits.max(1)).contiguous();
    if (group->size() > 1) note(largest);
    all_reduce(largest, ReduceOp::max, with, place);
    const Tensor shifted = logits - largest.unsqueeze(1);
    const Tensor elsewhere = (targets < 0).logical_or(targets >= logits.size(1));
    const Tensor at = targets.masked_fill(elsewhere, 0).unsqueeze(1);
    const Tensor mine = shifted.gather(1, at).squeeze(1).masked_fill(elsewhere, 0);
    Tensor softmax = shifted.exp_();  // in place: `mine` was read before
    const Tensor sums = torch::stack({softmax.sum(1), mine});
    if (group->size() > 1) note(sums);
    all_reduce(sums, ReduceOp::sum, with, place);
    softmax.div_(sums[0].unsqueeze(1));
    context->save_for_backward({softmax, at, elsewhere});
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<TensorGroup>(group));
    return sums[0].log() - sums[1];
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    begin_backward(context);
    const auto saved = context->get_saved_variables();
    const Tensor &softmax = saved[0], &at = saved[1], &elsewhere = saved[2];
    const Tensor gradient = softmax * gradients[0].unsqueeze(1);
    gradient.scatter_add_(1, at, (-gradients[0]).masked_fill(elsewhere, 0).unsqueeze(1));
    return {gradient, Tensor(), Tensor()};
  }
};

}  // namespace

TensorParallelStatistics tensor_parallel_statistics() noexcept {
  return {operations_done.load(std::memory_order_relaxed), bytes_given.load(std::memory_order_relaxed)};
}

GroupShare group_share(std::int64_t extent, int rank, int size) {
  const std::int64_t least = extent / size, more = extent % size;
  return {least * rank + std::min<std::int64_t>(rank, more), least + (rank < more ? 1 : 0)};
}

Tensor copy_to_group(const Tensor& x, const std::shared_ptr<ProcessGroup>& group) {
  return apply("copy_to_group", Move::none, Move::sum, x, 0, 0, group);
}
Tensor reduce_from_group(const Tensor& x, const std::shared_ptr<ProcessGroup>& group) {
  return apply("reduce_from_group", Move::sum, Move::none, x, 0, 0, group);
}
Tensor gather_from_group(const Tensor& x, std::int64_t dim, const std::shared_ptr<ProcessGroup>& group,
                         std::int64_t extent) {
  return apply("gather_from_group", Move::gather, Move::slice, x, dim, extent, group);
}
Tensor scatter_to_group(const Tensor& x, std::int64_t dim, const std::shared_ptr<ProcessGroup>& group) {
  return apply("scatter_to_group", Move::slice, Move::gather, x, dim, 0, group);
}
Tensor all_gather_from_group(const Tensor& x, std::int64_t dim, const std::shared_ptr<ProcessGroup>& group,
                             std::int64_t extent) {
  return apply("all_gather_from_group", Move::gather, Move::sum_and_slice, x, dim, extent, group);
}
Tensor reduce_scatter_to_group(const Tensor& x, std::int64_t dim, const std::shared_ptr<ProcessGroup>& group) {
  return apply("reduce_scatter_to_group", Move::sum_and_slice, Move::gather, x, dim, 0, group);
}

Tensor sharded_dropout(const Tensor& x, double p, bool training, const std::shared_ptr<ProcessGroup>& given) {
  MANIPLE_REQUIRE(p >= 0 && p <= 1, "sharded_dropout: p is {}; expected 0 to 1", p);
  if (!training || p == 0) return x;
  const auto group = group_or_default(given, "sharded_dropout");
  if (group->size() == 1 || p == 1) return torch::dropout(x, p, true);
  // One number from LibTorch's generator, which is the same on all ranks, and the rank seed a separate generator for
  // this call.
  const auto drawn = static_cast<std::uint64_t>(torch::randint(INT64_MAX, {1}, torch::kInt64).item<std::int64_t>());
  at::Generator random = at::globalContext().defaultGenerator(x.device()).clone();
  random.set_current_seed(drawn * 0x9e3779b97f4a7c15 + static_cast<std::uint64_t>(group->rank()) + 1);
  const Tensor kept = torch::empty_like(x, x.options().requires_grad(false)).bernoulli_(1 - p, random);
  return x * kept.div_(1 - p);
}

Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& targets, std::int64_t vocabulary,
                                    const VocabParallelLossOptions& options) {
  const auto group = group_or_default(options.group, "vocab_parallel_cross_entropy");
  const GroupShare share = group_share(vocabulary, group->rank(), group->size());
  MANIPLE_REQUIRE(logits.dim() >= 1 && logits.size(-1) == share.count && share.count > 0,
                  "vocab_parallel_cross_entropy: logits of [{}] on rank {} of {}; expected [..., {}], its share of a "
                  "vocabulary of {}",
                  joined(logits.sizes()), group->rank(), group->size(), share.count, vocabulary);
  MANIPLE_REQUIRE(
      targets.scalar_type() == torch::kInt64 && targets.sizes() == logits.sizes().slice(0, logits.dim() - 1),
      "vocab_parallel_cross_entropy: targets of [{}] for logits of [{}]; expected int64 [{}]", joined(targets.sizes()),
      joined(logits.sizes()), joined(logits.sizes().slice(0, logits.dim() - 1)));
  const Tensor flat = targets.reshape({-1});
  const Tensor ignored = flat == options.ignore_index;
  if (targets.is_cpu()) {
    const Tensor wrong = ((flat < 0).logical_or(flat >= vocabulary)).logical_and(ignored.logical_not());
    MANIPLE_REQUIRE(!wrong.any().item<bool>(),
                    "vocab_parallel_cross_entropy: a target is {}; expected 0 to {}, or {} for none",
                    flat.masked_select(wrong)[0].item<std::int64_t>(), vocabulary - 1, options.ignore_index);
  }
  Tensor x = logits.reshape({-1, share.count});
  if (x.scalar_type() != torch::kFloat64) x = x.to(torch::kFloat32);
  const PublicCall call("vocab_parallel_cross_entropy");
  const Tensor losses = DividedCrossEntropy::apply(x, flat - share.begin, group).masked_fill(ignored, 0);
  switch (options.reduction) {
    case torch::Reduction::None: return losses.view(targets.sizes());
    case torch::Reduction::Sum: return losses.sum();
    default: return losses.sum() / ignored.logical_not().sum();
  }
}

}  // namespace maniple
