#include "comm/collective/hierarchy.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/base/rank_arithmetic.h"
#include "comm/collective/algorithms.h"
#include "comm/collective/reduce/reduce.h"

namespace maniple {
namespace {

constexpr std::size_t kOneRail = 64 * 1024;  // up to this size one message between hosts costs less than several

template <class Half>
void widen_as(const std::byte* from, std::span<float> to) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    Half value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    to[i] = static_cast<float>(value);
  }
}
template <class Half>
void narrow_as(std::span<const float> from, std::byte* to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    const Half value(from[i]);
    std::memcpy(to + i * sizeof value, &value, sizeof value);
  }
}
void widen(DType dtype, const std::byte* from, std::span<float> to) {
  dtype == DType::float16 ? widen_as<float16>(from, to) : widen_as<bfloat16>(from, to);
}
void narrow(DType dtype, std::span<const float> from, std::byte* to) {
  dtype == DType::float16 ? narrow_as<float16>(from, to) : narrow_as<bfloat16>(from, to);
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

struct Hierarchy::Run {
  Hierarchy& self;
  const Operation& op;
  OperationContext& context;
  bool compare;
  std::string_view forced;
  const Signature& signature;
  const Topology& topology = self.topology_;
  const std::vector<int>& local = topology.nodes[topology.node_rank()];
  const int me = topology.rank;
  const int my_node = topology.node_rank();
  const int my_local = topology.local_rank();
  const std::size_t element = op.element();

  // ---- Stages --------------------------------------------------------------------------------------------------

  void inside(const Operation& stage) {
    if (self.arena_ == nullptr) return run_alone(stage);
    ArenaCall call{*self.arena_, self.registered_, context, signature, compare, forced};
    run_in_arena(call, stage);
  }

  void between(const std::vector<int>& members, const Operation& stage) {
    if (members.size() == 1) return run_alone(stage);
    Exchange exchange(self.mesh_, members, signature, context.deadline());
    choose_mesh_algorithm(stage, static_cast<int>(members.size()), forced).run(exchange, stage);
  }

  Operation stage_of(Op kind) const {
    Operation stage;
    stage.op = kind;
    stage.dtype = op.dtype;
    stage.reduce = op.reduce;
    stage.seq = op.seq;
    stage.where = op.where;
    stage.ranks = topology.size();
    return stage;
  }

  // ---- Host leaders ----------------------------------------------------------------------------------------------

  int host_leader(int node, bool rooted) const {
    const int root_node = topology.members[op.root].node_rank;
    return rooted && node == root_node ? op.root : topology.nodes[node].front();
  }
  std::vector<int> host_leaders(bool rooted) const {
    std::vector<int> result;
    for (int node = 0; node < topology.node_count(); ++node) result.push_back(host_leader(node, rooted));
    return result;
  }
  int local_index(int rank) const { return topology.members[rank].local_rank; }
  int root_node() const { return topology.members[op.root].node_rank; }

  std::byte* scratch(std::size_t bytes) {
    if (self.scratch_.size() < bytes) self.scratch_.resize(bytes);
    return self.scratch_.data();
  }

  // ---- Operations ----------------------------------------------------------------------------------------------

  void all_reduce() {
    std::size_t rails = topology.nodes.front().size();
    for (const auto& node : topology.nodes) rails = std::min(rails, node.size());
    if (op.bytes() <= kOneRail) rails = 1;
    const Slices slices(op.count, element, static_cast<int>(rails));
    std::vector<std::size_t> counts(local.size(), 0);
    for (std::size_t rail = 0; rail < rails; ++rail) counts[rail] = slices.size(static_cast<int>(rail));
    const Parts parts(counts);
    std::byte* mine = op.out + parts.offset(my_local) * element;

    Operation first = stage_of(Op::reduce_scatter);
    first.parts = parts;
    first.in = op.in;
    first.out = mine;
    first.last_stage = false;
    inside(first);

    if (my_local < static_cast<int>(rails)) {
      std::vector<int> members;
      for (const auto& node : topology.nodes) members.push_back(node[my_local]);
      Operation second = stage_of(Op::all_reduce);
      second.count = parts.count(my_local);
      second.in = mine;
      second.out = mine;
      second.first_stage = false;
      between(members, second);
    }

    Operation third = stage_of(Op::all_gather);
    third.parts = parts;
    third.in = mine;
    third.out = op.out;
    inside(third);
  }

  void reduce_to_root() {
    const int leader = host_leader(my_node, true);
    std::byte* partial = me == op.root ? op.out : me == leader ? scratch(op.bytes()) : nullptr;
    Operation first = stage_of(Op::reduce);
    first.count = op.count;
    first.root = local_index(leader);
    first.in = op.in;
    first.out = partial;
    first.last_stage = false;
    inside(first);
    if (me != leader) return;
    Operation second = stage_of(Op::reduce);
    second.count = op.count;
    second.root = root_node();
    second.in = partial;
    second.out = op.out;
    second.first_stage = false;
    between(host_leaders(true), second);
  }

  void broadcast() {
    const int leader = host_leader(my_node, true);
    Operation stage = stage_of(Op::broadcast);
    stage.count = op.count;
    stage.in = op.out;
    stage.out = op.out;
    stage.root = root_node();
    if (me == leader) between(host_leaders(true), stage);
    stage.root = local_index(leader);
    inside(stage);
  }

  // Whether each host holds a contiguous block of the parts: its ranks are consecutive and in order. The usual case.
  bool hosts_are_contiguous() const {
    int next = 0;
    for (const auto& node : topology.nodes) {
      for (const int rank : node) {
        if (rank != next++) return false;
      }
    }
    return true;
  }
  Parts local_parts() const {
    std::vector<std::size_t> counts;
    for (const int rank : local) counts.push_back(op.parts.count(rank));
    return Parts(counts);
  }
  Parts host_parts() const {
    std::vector<std::size_t> counts;
    for (const auto& node : topology.nodes) {
      std::size_t total = 0;
      for (const int rank : node) total += op.parts.count(rank);
      counts.push_back(total);
    }
    return Parts(counts);
  }

  void all_gather() {
    std::byte* block = op.out + op.parts.offset(local.front()) * element;
    Operation first = stage_of(Op::all_gather);
    first.parts = local_parts();
    first.in = op.in;
    first.out = block;
    inside(first);
    if (my_local == 0) {
      Operation second = stage_of(Op::all_gather);
      second.parts = host_parts();
      second.in = block;
      second.out = op.out;
      between(host_leaders(false), second);
    }
    Operation third = stage_of(Op::broadcast);
    third.count = op.parts.total();
    third.in = op.out;
    third.out = op.out;
    inside(third);
  }

  void reduce_scatter() {
    const std::size_t total = op.parts.total();
    std::byte* sums = my_local == 0 ? scratch(total * element) : nullptr;
    Operation first = stage_of(Op::reduce);
    first.count = total;
    first.in = op.in;
    first.out = sums;
    first.last_stage = false;
    inside(first);
    const Parts hosts = host_parts();
    std::byte* block = my_local == 0 ? sums + hosts.offset(my_node) * element : nullptr;
    if (my_local == 0) {
      Operation second = stage_of(Op::reduce_scatter);
      second.parts = hosts;
      second.in = sums;
      second.out = block;
      second.first_stage = false;
      between(host_leaders(false), second);
    }
    Operation third = stage_of(Op::scatter);
    third.parts = local_parts();
    third.in = block;
    third.out = op.out;
    inside(third);
  }

  void barrier() {
    const Operation stage = stage_of(Op::barrier);
    inside(stage);
    if (my_local == 0) between(host_leaders(false), stage);
    inside(stage);
  }

  void flat() {
    Operation stage = op;
    stage.ranks = topology.size();
    between(all_ranks(topology.size()), stage);
  }

  void run() {
    switch (op.op) {
      case Op::all_reduce: return all_reduce();
      case Op::reduce: return reduce_to_root();
      case Op::broadcast: return broadcast();
      case Op::all_gather: return hosts_are_contiguous() ? all_gather() : flat();
      case Op::reduce_scatter: return hosts_are_contiguous() ? reduce_scatter() : flat();
      case Op::barrier: return barrier();
      default: return flat();
    }
  }
};

void Hierarchy::run(const Operation& operation, OperationContext& context, bool compare, std::string_view forced) {
  const Signature signature = Signature::of(operation);
  const bool reduces =
      operation.op == Op::all_reduce || operation.op == Op::reduce || operation.op == Op::reduce_scatter;
  if (!reduces || !rounds_partial_results(operation))
    return Run{*this, operation, context, compare, forced, signature}.run();
  Operation wide = operation;
  wide.dtype = DType::float32;
  const bool scatters = operation.op == Op::reduce_scatter;
  const std::size_t in_count = scatters ? operation.parts.total() : operation.count;
  std::size_t out_count = scatters ? operation.parts.count(topology_.rank) : operation.count;
  if (operation.op == Op::reduce && topology_.rank != operation.root) out_count = 0;
  wide_in_.resize(in_count);
  wide_out_.resize(std::max(out_count, scatters ? std::size_t{0} : in_count));
  widen(operation.dtype, operation.in, wide_in_);
  wide.in = reinterpret_cast<const std::byte*>(wide_in_.data());
  wide.out = reinterpret_cast<std::byte*>(wide_out_.data());
  Run{*this, wide, context, compare, forced, signature}.run();
  narrow(operation.dtype, std::span(wide_out_).first(out_count), operation.out);
}

}  // namespace maniple
