// reduce (direct, tree) and reduce_scatter (direct, ring) over the mesh. n ranks, buffer of B bytes.
#include <vector>

#include "comm/collective/algorithms.h"
#include "comm/collective/mesh/slices.h"
#include "comm/collective/reduce/reduce.h"

namespace maniple {

// reduce, direct: operands in rank order.
//
// Small buffers: every rank sends its buffer to the root, which reduces. One step; each rank sends B. Larger buffers:
// by slices (see slices.h); each rank reduces its slice and sends it to the root. Two steps; every rank sends B and
// receives (n-1)/n B, the root receives 2 (n-1)/n B, so the root's link does not become a bottleneck.
void mesh_reduce_direct(Exchange& exchange, const Operation& operation) {
  using Audience = SliceWork::Audience;
  if (operation.bytes() <= kSmallReduceBytes) return reduce_at_once(exchange, operation, Audience::root);
  const bool is_root = exchange.rank() == operation.root;
  const Parts slices = even_parts(operation.count, exchange.size());
  reduce_by_slices(exchange,
                   {.in = operation.in,
                    .slices = slices,
                    .reduction = reduction_of(operation, exchange.size()),
                    .own = is_root ? operation.out + slices.offset(exchange.rank()) * operation.element() : nullptr,
                    .all = is_root ? operation.out : nullptr,
                    .audience = Audience::root,
                    .root = operation.root});
}

// reduce, tree: partial results travel up a binomial tree to the root, chunk by chunk.
//
// Counted from the root, a subtree holds consecutive ranks, and a rank combines its own operand first and then its
// children's partial results in order. So operands are combined in rank order, starting with the root, grouped by the
// tree. log2(n) steps; every rank but the root sends B, the root receives log2(n) B. Sums of 16-bit numbers use the
// direct algorithm, which rounds only once.
void mesh_reduce_tree(Exchange& exchange, const Operation& operation) {
  constexpr std::size_t kSlots = 4;  // chunks in transit from each child, and to the parent
  if (rounds_partial_results(operation)) return mesh_reduce_direct(exchange, operation);
  const int size = exchange.size();
  const BinomialTree tree = binomial_tree(exchange.rank(), operation.root, size);
  const bool is_root = tree.parent < 0;
  const std::size_t element = operation.element();
  const std::size_t children = tree.children.size();
  const Chunks chunks{{0, operation.count}, chunk_elements(operation.count, element)};
  const std::size_t slot_bytes = chunks.each * element;
  const std::span<std::byte> scratch = exchange.scratch(slot_bytes * kSlots * (children + 1));
  const auto slot = [&](std::size_t c, std::size_t child) {
    return scratch.data() + (child * kSlots + c % kSlots) * slot_bytes;
  };
  post_headers(exchange);

  std::vector<Exchange::Ticket> receives(kSlots * children);
  std::vector<Exchange::Ticket> sends(kSlots);
  const auto post_receives = [&](std::size_t c) {
    for (std::size_t i = 0; i < children && c < chunks.count(); ++i) {
      receives[i * kSlots + c % kSlots] = exchange.recv(tree.children[i], {slot(c, i), chunks.at(c).count * element});
    }
  };
  for (std::size_t c = 0; c < kSlots; ++c) post_receives(c);

  std::vector<const void*> sources(children + 1);
  for (std::size_t c = 0; c < chunks.count(); ++c) {
    const Slice slice = chunks.at(c);
    if (!is_root && c >= kSlots) exchange.wait(sends[c % kSlots]);
    std::byte* const own = slot(c, children);
    std::byte* const result = is_root ? operation.out + slice.offset * element : own;
    void* destination = own;
    sources[0] = operation.in + slice.offset * element;
    for (std::size_t i = 0; i < children; ++i) {
      exchange.wait(receives[i * kSlots + c % kSlots]);
      sources[i + 1] = slot(c, i);
    }
    if (slice.count > 0) {
      if (operation.reduce.kind() == ReduceOp::premul_sum) {
        reduce(reduction_of(operation, size), std::span(sources).first(1), {&destination, 1}, slice.count);
        sources[0] = own;
      }
      destination = result;
      reduce(stage_reduction(operation, size, is_root), sources, {&destination, 1}, slice.count);
    }
    post_receives(c + kSlots);
    if (!is_root) sends[c % kSlots] = exchange.send(tree.parent, {own, slice.count * element});
  }
  exchange.wait_all();
}

// reduce_scatter, direct: every rank sends each owner its part; the owner reduces the operands in rank order.
//
// One step; every rank sends (n-1)/n B and receives (n-1) times its own part, chunk by chunk (see slices.h).
void mesh_reduce_scatter_direct(Exchange& exchange, const Operation& operation) {
  reduce_by_slices(exchange, {.in = operation.in,
                              .slices = operation.parts,
                              .reduction = reduction_of(operation, exchange.size()),
                              .own = operation.out});
}

// reduce_scatter, ring: partial results travel round the ring to the owner of the part (see slices.h).
//
// n-1 steps; each rank sends and receives (n-1)/n B, all between neighbours. Sums of 16-bit numbers use the direct
// algorithm, which rounds only once.
void mesh_reduce_scatter_ring(Exchange& exchange, const Operation& operation) {
  if (rounds_partial_results(operation)) return mesh_reduce_scatter_direct(exchange, operation);
  post_headers(exchange);
  ring_reduce_slices(exchange, operation, operation.parts, operation.out);
  exchange.wait_all();
}

}  // namespace maniple
