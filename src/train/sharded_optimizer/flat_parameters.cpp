#include "train/sharded_optimizer/flat_parameters.h"

#include <algorithm>
#include <numeric>

#include "comm/base/check.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"

namespace maniple {
namespace {

/// Whether the parameter's elements lie in a row in the order of a contiguous tensor.
bool is_flat(const torch::Tensor& parameter) { return parameter.is_contiguous() || !is_dense(parameter); }

std::string named(std::size_t group, std::size_t index) {
  return format_text("parameter {} of group {}", index, group);
}

/// Refuses parameters that overlap in memory: each would be moved to its own place, and changes of one would no longer
/// reach the other.
void require_apart(const std::vector<FlatParameters::Item>& items) {
  struct Extent {
    const char *begin, *end;
    const FlatParameters::Item* item;
  };
  std::vector<Extent> extents;
  for (const auto& item : items) {
    const torch::Tensor& tensor = item.parameter;
    if (tensor.numel() == 0) continue;
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto* begin = static_cast<const char*>(tensor.data_ptr());
    extents.push_back({begin, begin + (last + 1) * static_cast<std::int64_t>(tensor.element_size()), &item});
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < extents.size(); ++i) {
    const auto &one = *extents[i - 1].item, &other = *extents[i].item;
    MANIPLE_REQUIRE(extents[i - 1].end <= extents[i].begin || one.parameter.device() != other.parameter.device(),
                    "ShardedOptimizer: {} and {} share memory; where two modules use one weight, give both the same "
                    "tensor, and the optimizer that tensor once",
                    named(one.group, one.index), named(other.group, other.index));
  }
}

}  // namespace

std::vector<CutPoint> cut_evenly(const std::vector<CutMember>& members, int parts) {
  std::int64_t total = 0;
  for (const CutMember& member : members) total += member.elements * member.cost;
  std::vector<CutPoint> points;
  std::size_t at = 0;
  std::int64_t before = 0;  // cost of the members before `at`
  for (int part = 1; part < parts; ++part) {
    // total * part / parts, without overflow.
    const std::int64_t target = total / parts * part + total % parts * part / parts;
    while (at < members.size() && before + members[at].elements * members[at].cost <= target) {
      before += members[at].elements * members[at].cost;
      ++at;
    }
    if (at == members.size()) {
      points.push_back({at, 0});
      continue;
    }
    const CutMember& member = members[at];
    const std::int64_t unit = member.unit == 0 ? member.elements : member.unit;
    const std::int64_t element = ((target - before) / member.cost + unit / 2) / unit * unit;
    points.push_back(element >= member.elements ? CutPoint{at + 1, 0} : CutPoint{at, element});
  }
  return points;
}

FlatParameters::FlatParameters(FlatOptions options, const std::vector<Item>& items) : options_(std::move(options)) {
  const torch::NoGradGuard no_grad;
  require_apart(items);
  lay_out(items);
  for (Row& row : rows_) move_in(row);
  cut();
}

void FlatParameters::lay_out(const std::vector<Item>& items) {
  for (const Item& item : items) {
    const torch::Tensor& parameter = item.parameter;
    auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& one) {
      const torch::Tensor& other = one.members.front().parameter;
      return other.scalar_type() == parameter.scalar_type() && other.device() == parameter.device();
    });
    if (row == rows_.end()) {
      row = rows_.emplace(rows_.end());
      row->layout = PackedLayout(parameter.element_size());
      row->device = device_of(parameter, {"ShardedOptimizer", "parameter"});
    }
    row->members.push_back({item.group, item.index, parameter, item.cost, nullptr});
    row->layout.add(parameter.numel());
  }
}

void FlatParameters::move_in(Row& row) {
  ProcessGroup& group = *options_.group;
  const std::size_t bytes = row.layout.bytes();
  row.memory = options_.shared ? group.allocate_shared(bytes, {}, public_place())
                               : allocate_for(group, std::max<std::size_t>(bytes, 1), row.device);
  std::vector<torch::Tensor> places;
  for (std::size_t i = 0; i < row.members.size(); ++i) {
    const torch::Tensor& tensor = row.members[i].parameter;
    places.push_back(row.layout.view(row.memory, 0, i, tensor));
    if (group.rank() == 0) places.back().copy_(tensor.detach());
  }
  const Buffer all{row.memory.data(), bytes, DType::uint8, row.device};
  if (!options_.shared) {
    group.broadcast(all, 0, {.stream = current_stream_on(row.device)}, public_place());
  } else {
    if (options_.leaders && options_.leaders->is_member()) options_.leaders->broadcast(all, 0, {}, public_place());
    group.barrier({}, public_place());
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    row.members[i].parameter.set_data(places[i]);
    row.members[i].address = places[i].data_ptr();
  }
}

void FlatParameters::cut() {
  const Topology& topology = options_.group->topology();
  const int ranks = topology.size();
  // The order of ranks in a row: by rank; with `shared`, the ranks of a host are adjacent.
  std::vector<int> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  if (options_.shared) {
    order.clear();
    for (const auto& node : topology.nodes) order.insert(order.end(), node.begin(), node.end());
  }
  const std::size_t own = std::find(order.begin(), order.end(), topology.rank) - order.begin();
  std::vector<CutMember> members;
  for (const Row& row : rows_) {
    for (std::size_t i = 0; i < row.members.size(); ++i) {
      const Member& member = row.members[i];
      members.push_back({static_cast<std::int64_t>(row.layout.padded(i)),
                         is_flat(member.parameter) ? static_cast<std::int64_t>(row.layout.alignment()) : 0,
                         member.cost});
    }
  }
  std::vector<CutPoint> points = cut_evenly(members, ranks);
  points.push_back({members.size(), 0});

  std::size_t first = 0;  // index of the row's first member
  for (Row& row : rows_) {
    PackedLayout& layout = row.layout;
    const std::size_t last = first + row.members.size();
    std::vector<std::size_t> ends;
    for (const CutPoint& point : points) {
      if (point.member < first) {
        ends.push_back(0);
      } else if (point.member >= last) {
        ends.push_back(layout.total());
      } else {
        ends.push_back(layout.offset(point.member - first) + point.element);
      }
    }
    layout.cut(std::move(ends));
    for (std::size_t i = 0; i < row.members.size(); ++i) {
      const Member& member = row.members[i];
      const torch::Tensor& parameter = member.parameter;
      const PackedLayout::Piece piece = layout.piece(own, i);
      // A parameter without elements has state, too; rank 0 holds it.
      if (piece.count == 0 && (parameter.numel() != 0 || topology.rank != 0)) continue;
      ParameterSlice& slice = slices_.emplace_back();
      slice.group = member.group, slice.index = member.index;
      slice.parameter = parameter;
      slice.offset = static_cast<std::int64_t>(piece.begin);
      slice.count = static_cast<std::int64_t>(piece.count);
      slice.local = slice.is_whole() ? layout.view(row.memory, 0, i, parameter)
                                     : tensor_on(row.memory, piece.offset * layout.element_bytes(), {slice.count}, {1},
                                                 parameter.options());
    }
    if (options_.shared) {  // the first rank of a host sends what all ranks of that host have stepped
      std::vector<std::size_t> ends_of_hosts;
      std::size_t parts = 0;
      for (const auto& node : topology.nodes) {
        parts += node.size();
        ends_of_hosts.push_back(layout.part_end(parts - 1));
      }
      layout.cut(std::move(ends_of_hosts));
    }
    row.bytes_of_parts = layout.part_bytes();
    first = last;
  }
}

std::string FlatParameters::moved() const {
  for (const Row& row : rows_) {
    for (const Member& member : row.members) {
      if (member.parameter.numel() != 0 && member.parameter.data_ptr() != member.address)
        return named(member.group, member.index);
    }
  }
  return {};
}

void FlatParameters::gather() {
  const bool hosts_exchange = options_.shared && options_.group->topology().node_count() > 1;
  if (hosts_exchange) options_.group->barrier({}, public_place());
  if (!options_.shared || (hosts_exchange && options_.leaders->is_member())) {
    ProcessGroup& group = options_.shared ? *options_.leaders : *options_.group;
    for (Row& row : rows_) {
      const PackedLayout& layout = row.layout;
      if (layout.total() == 0) continue;
      auto* data = static_cast<std::byte*>(row.memory.data());
      const std::size_t own = group.rank();
      group.all_gather(ConstBuffer{data + layout.part_begin(own) * layout.element_bytes(), row.bytes_of_parts[own],
                                   DType::uint8, row.device},
                       Buffer{data, layout.bytes(), DType::uint8, row.device}, row.bytes_of_parts,
                       {.stream = current_stream_on(row.device)}, public_place());
    }
  }
  if (options_.shared) options_.group->barrier({}, public_place());
}

void FlatParameters::leave() {
  const torch::NoGradGuard no_grad;
  for (Row& row : rows_) {
    for (Member& member : row.members) member.parameter.set_data(member.parameter.detach().clone());
  }
}

}  // namespace maniple
