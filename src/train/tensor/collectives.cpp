// The collectives of dist.h: they stage tensors, and the group communicates.
#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "comm/backend/work_state.h"
#include "comm/base/check.h"
#include "comm/base/log.h"
#include "train/tensor/run_operation.h"

namespace maniple {
namespace {

bool is_whole_number(DType dtype) {
  return dtype != DType::float16 && dtype != DType::bfloat16 && dtype != DType::float32 && dtype != DType::float64;
}

/// Warns once: the integer average truncates towards zero, as documented, but that is rarely intended.
void warn_of_truncation(const char* operation) {
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  log_warning(
      "{}: avg of an integer tensor divides towards zero (the average of 1 and 2 is 1); convert it to floating point, "
      "or use sum (further calls are not reported)",
      operation);
}

void require_reducible(const Staged& tensor, ReduceOp op, const char* operation) {
  const bool linear = op.kind() == ReduceOp::sum || op.kind() == ReduceOp::avg || op.kind() == ReduceOp::premul_sum;
  MANIPLE_REQUIRE(!tensor.complex() || linear, "{}: {} has no meaning for complex tensors; sum and avg have", operation,
                  to_string(op.kind()));
  if (op.kind() == ReduceOp::avg && !tensor.complex() && is_whole_number(tensor.buffer().dtype))
    warn_of_truncation(operation);
}

void require_same_dtype(const Staged& a, const Staged& b, const char* operation, const char* names) {
  MANIPLE_REQUIRE(a.buffer().dtype == b.buffer().dtype && a.complex() == b.complex(),
                  "{}: {} have different dtypes ({} and {})", operation, names, to_string(a.buffer().dtype),
                  to_string(b.buffer().dtype));
}

void require_one_for_each(std::size_t given, const ProcessGroup& group, const char* operation, const char* name) {
  MANIPLE_REQUIRE(std::cmp_equal(given, group.size()), "{}: {} holds {} tensors for {} ranks", operation, name, given,
                  group.size());
}

void require_none_elsewhere(const std::vector<torch::Tensor>& list, const ProcessGroup& group, int root,
                            const char* operation, const char* name, const char* root_name) {
  MANIPLE_REQUIRE(root >= 0 && root < group.size(), "{}: {} is {} in a group of {} ranks", operation, root_name, root,
                  group.size());
  MANIPLE_REQUIRE(group.rank() == root || list.empty(), "{}: only {} ({}) passes a {}", operation, root_name,
                  rank_text(group, root), name);
}

bool all_equal(const std::vector<std::size_t>& counts) {
  return std::all_of(counts.begin(), counts.end(), [&](std::size_t count) { return count == counts[0]; });
}

/// Equal parts need no counts, and are faster without them.
std::span<const std::size_t> uneven(const std::vector<std::size_t>& counts) {
  return all_equal(counts) ? std::span<const std::size_t>() : std::span<const std::size_t>(counts);
}

}  // namespace

Work broadcast(const torch::Tensor& tensor, PeerRank src, const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "broadcast")) return done_work();
  const int root = group_rank_of(*group, src, "broadcast", "src");
  const Staged staged(tensor, group->rank() == root ? Access::read : Access::write, {"broadcast", "tensor"});
  return run_operation(options, {staged},
                       [&](const CallOptions& call) { return group->broadcast(staged.buffer(), root, call, where); });
}

Work reduce(const torch::Tensor& tensor, PeerRank dst, ReduceOp op, const DistOptions& options,
            const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "reduce")) return done_work();
  const int root = group_rank_of(*group, dst, "reduce", "dst");
  const bool here = group->rank() == root;
  const Staged staged(tensor, here ? Access::read_write : Access::read, {"reduce", "tensor"});
  require_reducible(staged, op, "reduce");
  const Buffer out = here ? staged.buffer() : Buffer{nullptr, 0, staged.buffer().dtype, staged.buffer().device};
  return run_operation(options, {staged}, [&](const CallOptions& call) {
    return group->reduce(staged.buffer(), out, root, op, call, where);
  });
}

Work all_reduce(const torch::Tensor& tensor, ReduceOp op, const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "all_reduce")) return done_work();
  const Staged staged(tensor, Access::read_write, {"all_reduce", "tensor"});
  require_reducible(staged, op, "all_reduce");
  return run_operation(options, {staged},
                       [&](const CallOptions& call) { return group->all_reduce(staged.buffer(), op, call, where); });
}

Work all_reduce_coalesced(const std::vector<torch::Tensor>& tensors, ReduceOp op, const DistOptions& options,
                          const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "all_reduce_coalesced")) return done_work();
  std::vector<Staged> staged;
  std::vector<Buffer> buffers;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    staged.emplace_back(tensors[i], Access::read_write,
                        Argument{"all_reduce_coalesced", "tensors", static_cast<int>(i)});
    require_reducible(staged.back(), op, "all_reduce_coalesced");
    buffers.push_back(staged.back().buffer());
  }
  return run_operation(options, std::move(staged),
                       [&](const CallOptions& call) { return group->all_reduce_coalesced(buffers, op, call, where); });
}

Work gather(const torch::Tensor& tensor, const std::vector<torch::Tensor>& gather_list, PeerRank dst,
            const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "gather")) return done_work();
  const int root = group_rank_of(*group, dst, "gather", "dst");
  require_none_elsewhere(gather_list, *group, root, "gather", "gather_list", "dst");
  const Staged in(tensor, Access::read, {"gather", "tensor"});
  Staged out;
  Buffer to{nullptr, 0, in.buffer().dtype, in.buffer().device};
  if (group->rank() == root) {
    require_one_for_each(gather_list.size(), *group, "gather", "gather_list");
    out = Staged(gather_list, Access::write, {"gather", "gather_list"});
    require_same_dtype(in, out, "gather", "tensor and gather_list");
    MANIPLE_REQUIRE(all_equal(out.counts()),
                    "gather: the tensors of gather_list differ in size; all ranks send the same number of elements");
    to = out.buffer();
  }
  return run_operation(options, {in, out},
                       [&](const CallOptions& call) { return group->gather(in.buffer(), to, root, {}, call, where); });
}

Work all_gather(const std::vector<torch::Tensor>& tensor_list, const torch::Tensor& tensor, const DistOptions& options,
                const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "all_gather")) return done_work();
  require_one_for_each(tensor_list.size(), *group, "all_gather", "tensor_list");
  const Staged in(tensor, Access::read, {"all_gather", "tensor"});
  const Staged out(tensor_list, Access::write, {"all_gather", "tensor_list"});
  require_same_dtype(in, out, "all_gather", "tensor and tensor_list");
  return run_operation(options, {in, out}, [&](const CallOptions& call) {
    return group->all_gather(in.buffer(), out.buffer(), uneven(out.counts()), call, where);
  });
}

Work all_gather_into_tensor(const torch::Tensor& output, const torch::Tensor& input, const DistOptions& options,
                            const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "all_gather_into_tensor")) return done_work();
  const Staged in(input, Access::read, {"all_gather_into_tensor", "input"});
  const Staged out(output, Access::write, {"all_gather_into_tensor", "output"});
  require_same_dtype(in, out, "all_gather_into_tensor", "input and output");
  return run_operation(options, {in, out}, [&](const CallOptions& call) {
    return group->all_gather(in.buffer(), out.buffer(), {}, call, where);
  });
}

Work scatter(const torch::Tensor& tensor, const std::vector<torch::Tensor>& scatter_list, PeerRank src,
             const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "scatter")) return done_work();
  const int root = group_rank_of(*group, src, "scatter", "src");
  require_none_elsewhere(scatter_list, *group, root, "scatter", "scatter_list", "src");
  const Staged out(tensor, Access::write, {"scatter", "tensor"});
  Staged in;
  Buffer from{nullptr, 0, out.buffer().dtype, out.buffer().device};
  if (group->rank() == root) {
    require_one_for_each(scatter_list.size(), *group, "scatter", "scatter_list");
    in = Staged(scatter_list, Access::read, {"scatter", "scatter_list"});
    require_same_dtype(in, out, "scatter", "scatter_list and tensor");
    MANIPLE_REQUIRE(
        all_equal(in.counts()),
        "scatter: the tensors of scatter_list differ in size; all ranks receive the same number of elements");
    from = in.buffer();
  }
  return run_operation(options, {in, out}, [&](const CallOptions& call) {
    return group->scatter(from, out.buffer(), root, {}, call, where);
  });
}

Work reduce_scatter(const torch::Tensor& output, const std::vector<torch::Tensor>& input_list, ReduceOp op,
                    const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "reduce_scatter")) return done_work();
  require_one_for_each(input_list.size(), *group, "reduce_scatter", "input_list");
  const Staged in(input_list, Access::read, {"reduce_scatter", "input_list"});
  const Staged out(output, Access::write, {"reduce_scatter", "output"});
  require_same_dtype(in, out, "reduce_scatter", "input_list and output");
  require_reducible(in, op, "reduce_scatter");
  return run_operation(options, {in, out}, [&](const CallOptions& call) {
    return group->reduce_scatter(in.buffer(), out.buffer(), op, uneven(in.counts()), call, where);
  });
}

Work reduce_scatter_tensor(const torch::Tensor& output, const torch::Tensor& input, ReduceOp op,
                           const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "reduce_scatter_tensor")) return done_work();
  const Staged in(input, Access::read, {"reduce_scatter_tensor", "input"});
  const Staged out(output, Access::write, {"reduce_scatter_tensor", "output"});
  require_same_dtype(in, out, "reduce_scatter_tensor", "input and output");
  require_reducible(in, op, "reduce_scatter_tensor");
  return run_operation(options, {in, out}, [&](const CallOptions& call) {
    return group->reduce_scatter(in.buffer(), out.buffer(), op, {}, call, where);
  });
}

namespace {

// One rank cannot know whether all pairs exchange equal amounts, so counts are always passed.
Work exchange(ProcessGroup& group, Staged in, Staged out, std::vector<std::size_t> in_counts,
              std::vector<std::size_t> out_counts, const DistOptions& options, const SourceLocation& where) {
  const Buffer from = in.buffer();
  const Buffer to = out.buffer();
  return run_operation(options, {std::move(in), std::move(out)}, [&](const CallOptions& call) {
    return group.all_to_all(from, to, in_counts, out_counts, call, where);
  });
}

/// The number of elements in each part of a tensor that is cut along its first dimension.
std::vector<std::size_t> parts_of(const torch::Tensor& tensor, const std::vector<std::int64_t>& rows,
                                  const Staged& staged, const char* name, int ranks) {
  if (rows.empty()) return {};
  MANIPLE_REQUIRE(std::ssize(rows) == ranks, "all_to_all_single: {} split sizes of {} for {} ranks", rows.size(), name,
                  ranks);
  MANIPLE_REQUIRE(tensor.dim() > 0, "all_to_all_single: {} is a scalar and cannot be cut", name);
  std::int64_t total = 0;
  for (const std::int64_t count : rows) {
    MANIPLE_REQUIRE(count >= 0, "all_to_all_single: a split size of {} is negative", name);
    MANIPLE_REQUIRE(count <= std::numeric_limits<std::int64_t>::max() - total,
                    "all_to_all_single: the split sizes of {} sum up to more than 2^63 - 1", name);
    total += count;
  }
  MANIPLE_REQUIRE(total == tensor.size(0), "all_to_all_single: the split sizes of {} sum up to {}, but it has {} rows",
                  name, total, tensor.size(0));
  const std::size_t row = total == 0 ? 0 : staged.buffer().count / total;
  std::vector<std::size_t> result;
  for (const std::int64_t count : rows) result.push_back(count * row);
  return result;
}

std::vector<std::size_t> equal_parts(const Staged& staged, int ranks, const char* name) {
  const std::size_t count = staged.buffer().count;
  MANIPLE_REQUIRE(count % ranks == 0,
                  "all_to_all_single: {} has {} elements, which {} ranks do not divide; give "
                  "split sizes",
                  name, count, ranks);
  return std::vector<std::size_t>(ranks, count / ranks);
}

}  // namespace

Work all_to_all(const std::vector<torch::Tensor>& output_list, const std::vector<torch::Tensor>& input_list,
                const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "all_to_all")) return done_work();
  require_one_for_each(input_list.size(), *group, "all_to_all", "input_list");
  require_one_for_each(output_list.size(), *group, "all_to_all", "output_list");
  Staged in(input_list, Access::read, {"all_to_all", "input_list"});
  Staged out(output_list, Access::write, {"all_to_all", "output_list"});
  require_same_dtype(in, out, "all_to_all", "input_list and output_list");
  auto in_counts = in.counts();
  auto out_counts = out.counts();
  return exchange(*group, std::move(in), std::move(out), std::move(in_counts), std::move(out_counts), options, where);
}

Work all_to_all_single(const torch::Tensor& output, const torch::Tensor& input,
                       const std::vector<std::int64_t>& output_split_sizes,
                       const std::vector<std::int64_t>& input_split_sizes, const DistOptions& options,
                       const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "all_to_all_single")) return done_work();
  Staged in(input, Access::read, {"all_to_all_single", "input"});
  Staged out(output, Access::write, {"all_to_all_single", "output"});
  require_same_dtype(in, out, "all_to_all_single", "input and output");
  auto in_counts = parts_of(input, input_split_sizes, in, "input", group->size());
  auto out_counts = parts_of(output, output_split_sizes, out, "output", group->size());
  if (in_counts.empty() != out_counts.empty()) {
    if (in_counts.empty()) in_counts = equal_parts(in, group->size(), "input");
    if (out_counts.empty()) out_counts = equal_parts(out, group->size(), "output");
  }
  return exchange(*group, std::move(in), std::move(out), std::move(in_counts), std::move(out_counts), options, where);
}

Work barrier(const DistOptions& options, const SourceLocation& where) {
  const auto group = group_of(options);
  return group->barrier(call_of(options), where);
}

void monitored_barrier(const DistOptions& options, const SourceLocation& where) {
  group_of(options)->monitored_barrier(options.timeout.value_or(std::chrono::seconds(30)), call_of(options), where);
}

std::string broadcast_object(std::string_view object, PeerRank src, const DistOptions& options,
                             const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "broadcast_object")) return {};
  return group->broadcast_object(object, group_rank_of(*group, src, "broadcast_object", "src"), call_of(options),
                                 where);
}
std::vector<std::string> gather_object(std::string_view object, PeerRank dst, const DistOptions& options,
                                       const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "gather_object")) return {};
  return group->gather_objects(object, group_rank_of(*group, dst, "gather_object", "dst"), call_of(options), where);
}
std::vector<std::string> all_gather_object(std::string_view object, const DistOptions& options,
                                           const SourceLocation& where) {
  return group_of(options)->all_gather_objects(object, call_of(options), where);
}
std::string scatter_object(const std::vector<std::string>& objects, PeerRank src, const DistOptions& options,
                           const SourceLocation& where) {
  const auto group = group_of(options);
  if (!takes_part(*group, "scatter_object")) return {};
  return group->scatter_objects(objects, group_rank_of(*group, src, "scatter_object", "src"), call_of(options), where);
}

}  // namespace maniple
