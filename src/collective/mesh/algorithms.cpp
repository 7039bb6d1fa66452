#include "collective/mesh/algorithms.h"

#include <algorithm>
#include <set>

#include "topology/rank_arithmetic.h"

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

void post_headers(Exchange& exchange) {
  constexpr int kAllPairs = 64;
  const int size = exchange.size();
  const int rank = exchange.rank();
  std::set<int> peers;
  if (size <= kAllPairs) {
    for (int step = 1; step < size; ++step) peers.insert(ring_rank(rank, step, size));
  } else {
    for (const int distance : doubling_distances(size)) {
      peers.insert(ring_rank(rank, distance, size));
      peers.insert(ring_rank(rank, -distance, size));
    }
  }
  for (const int peer : peers) recv_header(exchange, peer);
  for (const int peer : peers) send_header(exchange, peer);
}

}  // namespace maniple
