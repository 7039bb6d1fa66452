#include "train/ddp/tree_average.h"

#include <algorithm>
#include <utility>

#include "comm/base/check.h"
#include "train/tensor/public_call.h"

namespace maniple {
namespace {

/// Below this, one all_gather of everything is faster than two operations with slices.
constexpr std::int64_t kGatheredBytes = 32 * 1024;

/// The part of a contiguous tensor that begins at an element, as bytes.
Buffer byte_buffer(const torch::Tensor& tensor, std::int64_t begin, std::int64_t count) {
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  return {static_cast<char*>(tensor.data_ptr()) + begin * size, static_cast<std::size_t>(count * size), DType::uint8};
}
Buffer byte_buffer(const torch::Tensor& tensor) { return byte_buffer(tensor, 0, tensor.numel()); }

/// The additions of all `nodes` of all ranks. values[i] belongs to the i-th node; values[0] is the sum afterwards.
void add_all(int total, const std::vector<std::vector<TreeNode>>& nodes, std::vector<torch::Tensor> values,
             const torch::Tensor& result) {
  TreeNodes tree(total);
  std::vector<torch::Tensor> sums;
  std::size_t next = 0;
  for (const auto& of_rank : nodes) {
    for (const TreeNode& node : of_rank) {
      sums.push_back(std::move(values[next++]));
      tree.append(node, [&](std::size_t i) {
        sums[i].add_(sums[i + 1]);
        sums.pop_back();
      });
    }
  }
  MANIPLE_ASSERT(sums.size() == 1);
  result.copy_(sums[0]);
}

}  // namespace

void VirtualSums::append(std::vector<torch::Tensor> gradients) {
  const torch::NoGradGuard no_grad;
  sums_.push_back(std::move(gradients));
  nodes_.append({0, first_ + appended_++}, [&](std::size_t i) {
    for (std::size_t p = 0; p < sums_[i].size(); ++p) sums_[i][p].add_(sums_[i + 1][p]);
    sums_.pop_back();
  });
}

void VirtualSums::clear() noexcept {
  nodes_.clear();
  sums_.clear();
  appended_ = 0;
}

torch::Tensor VirtualSums::taken_from(torch::Tensor& parameter) {
  torch::Tensor gradient = std::exchange(parameter.mutable_grad(), torch::Tensor());
  if (!gradient.defined()) return torch::zeros_like(parameter).detach();
  // Autograd may hand out two gradients that are views of one tensor.
  return gradient.storage().use_count() > 1 ? gradient.clone() : gradient;
}

TreeAverage::TreeAverage(std::shared_ptr<ProcessGroup> group, int total)
    : group_(std::move(group)),
      own_(VirtualRanks::of(total, group_->rank(), group_->size())),
      kept_(total, own_.first) {
  for (int rank = 0; rank < group_->size(); ++rank) {
    const VirtualRanks one = VirtualRanks::of(total, rank, group_->size());
    TreeNodes nodes(total);
    for (int i = 0; i < one.count; ++i) nodes.append({0, one.first + i}, [](std::size_t) {});
    all_nodes_ += nodes.all().size();
    nodes_of_.push_back(nodes.all());
  }
}

TreeAverage::Way TreeAverage::way_of(const Bucket& bucket) const {
  if (size() == 1) return Way::alone;
  const DType dtype = bucket.buffer().dtype;
  if (size() == 2 && all_nodes_ == 2 && (dtype == DType::float32 || dtype == DType::float64)) return Way::pair;
  const torch::Tensor& flat = bucket.flat();
  return static_cast<std::int64_t>(flat.nbytes()) <= kGatheredBytes ? Way::gather : Way::slices;
}

std::int64_t TreeAverage::slice_begin(const torch::Tensor& flat, std::size_t rank) const {
  return flat.numel() * static_cast<std::int64_t>(rank) / static_cast<std::int64_t>(size());
}

/// This rank's nodes, one row for each.
torch::Tensor TreeAverage::packed(const Bucket& bucket) const {
  const torch::Tensor& flat = bucket.flat();
  const auto mine = static_cast<std::int64_t>(nodes_of_[static_cast<std::size_t>(group_->rank())].size());
  if (mine == 1) return flat.view({1, flat.numel()});
  torch::Tensor rows = torch::zeros({mine, flat.numel()}, flat.options());
  for (std::int64_t row = 0; row + 1 < mine; ++row) {
    for (std::size_t i = 0; i < bucket.members().size(); ++i) {
      const torch::Tensor& view = bucket.view(i);
      const auto offset = static_cast<const char*>(view.data_ptr()) - static_cast<const char*>(flat.data_ptr());
      const auto begin = row * flat.numel() + offset / static_cast<std::int64_t>(flat.element_size());
      rows.as_strided(view.sizes(), view.strides(), begin)
          .copy_(kept_.sums()[static_cast<std::size_t>(row)][bucket.members()[i]]);
    }
  }
  rows[mine - 1].copy_(flat);
  return rows;
}

Work TreeAverage::launch(const Bucket& bucket, bool async) {
  const torch::NoGradGuard no_grad;
  const CallOptions options{.async_op = async};
  const torch::Tensor& flat = bucket.flat();
  // The last virtual rank completes nodes from the right: those beyond the nodes that remain.
  const std::size_t remain = nodes_of_[static_cast<std::size_t>(group_->rank())].size() - 1;
  for (std::size_t node = kept_.nodes().size(); node-- > remain;) {
    for (std::size_t i = 0; i < bucket.members().size(); ++i)
      bucket.view(i).add_(kept_.sums()[node][bucket.members()[i]]);
  }
  const Way way = way_of(bucket);
  if (way == Way::alone) return {};
  if (way == Way::pair) return group_->all_reduce(bucket.buffer(), ReduceOp::sum, options, public_place());

  const auto index = static_cast<std::size_t>(bucket.index());
  if (exchanges_.size() <= index) exchanges_.resize(index + 1);
  Exchange& exchange = exchanges_[index];
  const std::size_t element = flat.element_size();
  const torch::Tensor rows = packed(bucket);
  const auto all = static_cast<std::int64_t>(all_nodes_);
  if (way == Way::gather) {
    std::vector<std::size_t> counts;
    for (const auto& nodes : nodes_of_) counts.push_back(nodes.size() * flat.nbytes());
    exchange.send = rows;
    if (!exchange.received.defined()) exchange.received = torch::empty({all * flat.numel()}, flat.options());
    return group_->all_gather(byte_buffer(exchange.send), byte_buffer(exchange.received), counts, options,
                              public_place());
  }
  const auto own_rank = static_cast<std::size_t>(group_->rank());
  const std::int64_t own_length = slice_begin(flat, own_rank + 1) - slice_begin(flat, own_rank);
  std::vector<std::size_t> send_counts, receive_counts;
  std::vector<torch::Tensor> parts;
  for (std::size_t rank = 0; rank < size(); ++rank) {
    const std::int64_t begin = slice_begin(flat, rank), length = slice_begin(flat, rank + 1) - begin;
    send_counts.push_back(static_cast<std::size_t>(rows.size(0) * length) * element);
    receive_counts.push_back(nodes_of_[rank].size() * static_cast<std::size_t>(own_length) * element);
    if (rows.size(0) > 1) parts.push_back(rows.narrow(1, begin, length).reshape(-1));
  }
  exchange.send = parts.empty() ? rows : torch::cat(parts);
  if (!exchange.received.defined()) exchange.received = torch::empty({all * own_length}, flat.options());
  return group_->all_to_all(byte_buffer(exchange.send), byte_buffer(exchange.received), send_counts, receive_counts,
                            options, public_place());
}

void TreeAverage::finish(const Bucket& bucket) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& flat = bucket.flat();
  const Way way = way_of(bucket);
  if (way == Way::alone || way == Way::pair) {
    flat.div_(own_.total);
    return;
  }
  Exchange& exchange = exchanges_[static_cast<std::size_t>(bucket.index())];
  exchange.send = torch::Tensor();
  const auto nodes = static_cast<std::int64_t>(all_nodes_);
  const auto values = exchange.received.view({nodes, exchange.received.numel() / nodes}).unbind(0);
  if (way == Way::gather) {
    add_all(own_.total, nodes_of_, values, flat);
    flat.div_(own_.total);
    return;
  }
  const auto own_rank = static_cast<std::size_t>(group_->rank());
  const std::int64_t begin = slice_begin(flat, own_rank), length = slice_begin(flat, own_rank + 1) - begin;
  const torch::Tensor slice = flat.narrow(0, begin, length);
  add_all(own_.total, nodes_of_, values, slice);
  slice.div_(own_.total);
  std::vector<std::size_t> counts;
  for (std::size_t rank = 0; rank < size(); ++rank) {
    counts.push_back(static_cast<std::size_t>(slice_begin(flat, rank + 1) - slice_begin(flat, rank)) *
                     flat.element_size());
  }
  group_->all_gather(byte_buffer(flat, begin, length), byte_buffer(flat), counts, {}, public_place());
}

}  // namespace maniple
