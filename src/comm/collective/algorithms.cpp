#include "comm/collective/algorithms.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/rank_arithmetic.h"

namespace maniple {
namespace {

constexpr MeshEntry kAlgorithms[] = {
    {Op::barrier, "direct", "everyone sends everyone a header; one step", mesh_barrier_direct},
    {Op::barrier, "dissemination", "log2(n) steps to ranks at doubling distances; for many ranks",
     mesh_barrier_dissemination},
    {Op::broadcast, "direct", "the root sends all to everyone; for small buffers and few ranks", mesh_broadcast_direct},
    {Op::broadcast, "tree", "binomial tree, in chunks; log2(n) steps, for small buffers and many ranks",
     mesh_broadcast_tree},
    {Op::broadcast, "scatter_gather", "the root sends a slice to each, which passes it on; for large buffers",
     mesh_broadcast_scatter_gather},
    {Op::reduce, "direct", "each reduces a slice and sends it to the root; operands in rank order", mesh_reduce_direct},
    {Op::reduce, "tree", "binomial tree, in chunks; log2(n) steps, for small buffers and many ranks", mesh_reduce_tree},
    {Op::all_reduce, "direct", "each reduces a slice and sends it to all; operands in rank order",
     mesh_all_reduce_direct},
    {Op::all_reduce, "exchange", "two ranks send each other all, and both reduce; operands in rank order",
     mesh_all_reduce_exchange},
    {Op::all_reduce, "ring", "slices travel round a ring of neighbours; for large buffers and many ranks",
     mesh_all_reduce_ring},
    {Op::all_reduce, "tree", "binomial tree to rank 0 and back; 2 log2(n) steps, for small buffers and very many ranks",
     mesh_all_reduce_tree},
    {Op::gather, "direct", "everyone sends to the root", mesh_gather_direct},
    {Op::all_gather, "direct", "everyone sends to everyone", mesh_all_gather_direct},
    {Op::all_gather, "ring", "parts travel round a ring of neighbours; for many ranks", mesh_all_gather_ring},
    {Op::scatter, "direct", "the root sends to everyone", mesh_scatter_direct},
    {Op::reduce_scatter, "direct", "each gets its part from all and reduces it; operands in rank order",
     mesh_reduce_scatter_direct},
    {Op::reduce_scatter, "ring", "partial results travel round a ring of neighbours; for many ranks",
     mesh_reduce_scatter_ring},
    {Op::all_to_all, "direct", "everyone sends to everyone", mesh_all_to_all_direct},
};

}  // namespace

std::span<const MeshEntry> mesh_algorithms() noexcept { return kAlgorithms; }

const MeshEntry* find_mesh_algorithm(Op op, std::string_view name) noexcept {
  const auto* found = std::find_if(std::begin(kAlgorithms), std::end(kAlgorithms),
                                   [&](const MeshEntry& entry) { return entry.op == op && entry.name == name; });
  return found == std::end(kAlgorithms) ? nullptr : found;
}

namespace {

struct ArenaEntry {
  std::string_view name;
  std::string_view sentence;
};
constexpr ArenaEntry kArenaAlgorithms[] = {
    {"inline", "shared memory, small: the bytes are published with the call; one synchronisation"},
    {"direct",
     "shared memory, registered buffers: ranks work on each other's memory; no copies. Ordinary ones that only move: "
     "read by the kernel, where that is faster"},
    {"staged", "shared memory, ordinary buffers: cache-sized pieces through shared slots, in a pipeline"},
};

std::string_view automatic(const Operation& op, int ranks) noexcept {
  constexpr std::size_t kLarge = 256 * 1024;
  constexpr int kMany = 16;      // beyond this, all-to-all traffic at once overloads the receivers
  constexpr int kVeryMany = 64;  // beyond this, even n (n-1) connections between all pairs cost too much
  // Two ranks: with "direct" each reduces one half and waits for the other's, with "exchange" both reduce everything.
  // Beyond this size the arithmetic saved is worth the wait.
  constexpr std::size_t kWorthHalving = 256 * 1024;
  switch (op.op) {
    case Op::all_reduce:
      if (ranks == 2 && op.bytes() <= kWorthHalving) return "exchange";
      if (ranks > kMany && op.bytes() > kLarge) return "ring";
      return ranks > kVeryMany ? "tree" : "direct";
    case Op::all_gather:
    case Op::reduce_scatter:
      return ranks > kVeryMany || (ranks > kMany && op.parts.total() * op.element() > kLarge) ? "ring" : "direct";
    case Op::broadcast: return ranks <= 2 ? "direct" : op.bytes() >= kLarge ? "scatter_gather" : "tree";
    case Op::reduce: return ranks > kMany && op.bytes() <= kLarge ? "tree" : "direct";
    case Op::barrier: return ranks > kMany ? "dissemination" : "direct";
    default: return "direct";
  }
}

}  // namespace

const MeshEntry& choose_mesh_algorithm(const Operation& op, int ranks, std::string_view forced) noexcept {
  if (!forced.empty()) {
    if (const MeshEntry* entry = find_mesh_algorithm(op.op, forced)) return *entry;
  }
  const MeshEntry* entry = find_mesh_algorithm(op.op, automatic(op, ranks));
  if (entry == nullptr) entry = find_mesh_algorithm(op.op, "direct");
  MANIPLE_ASSERT(entry != nullptr);
  return *entry;
}

void require_algorithm(std::string_view name) {
  if (name.empty()) return;
  std::set<std::string_view> names;
  for (const ArenaEntry& entry : kArenaAlgorithms) names.insert(entry.name);
  for (const MeshEntry& entry : mesh_algorithms()) names.insert(entry.name);
  MANIPLE_REQUIRE(names.count(name) != 0, "unknown algorithm \"{}\"; expected one of {}", name, joined(names));
}

std::string list_algorithms() {
  std::string text;
  for (const ArenaEntry& entry : kArenaAlgorithms)
    text += fmt::format("{:<15} {:<15} {}\n", "all", entry.name, entry.sentence);
  for (const MeshEntry& entry : mesh_algorithms()) {
    text += fmt::format("{:<15} {:<15} {}\n", to_string(entry.op), entry.name, entry.sentence);
  }
  return text;
}

}  // namespace maniple
