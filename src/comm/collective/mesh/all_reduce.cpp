// all_reduce over the mesh: direct, exchange, ring, tree. n ranks, buffer of B bytes.
#include "comm/collective/algorithms.h"
#include "comm/collective/mesh/slices.h"
#include "comm/collective/reduce/reduce.h"

#include <vector>

namespace maniple {

// all_reduce, direct: two variants, both with operands in rank order, so both give the same result.
//
// Small buffers: every rank sends its whole buffer to all others, and all reduce redundantly. One step; each rank sends
// (n-1) B. Larger buffers: by slices (see slices.h), with the all-gather of reduced slices running behind the
// reduce-scatter. Two steps; each rank sends and receives 2 (n-1)/n B, which is the minimum.
void mesh_all_reduce_direct(Exchange& exchange, const Operation& operation) {
  using Audience = SliceWork::Audience;
  if (operation.bytes() <= kSmallReduceBytes) return reduce_at_once(exchange, operation, Audience::everyone);
  const Parts slices = even_parts(operation.count, exchange.size());
  reduce_by_slices(exchange, {.in = operation.in,
                              .slices = slices,
                              .reduction = reduction_of(operation, exchange.size()),
                              .own = operation.out + slices.offset(exchange.rank()) * operation.element(),
                              .all = operation.out,
                              .audience = Audience::everyone});
}

// all_reduce, exchange: two ranks send each other the whole buffer, in chunks, and both reduce it.
//
// One step; each rank sends and receives B, like the direct algorithm with two ranks. The direct algorithm has a second
// step, in which a rank waits for the other's arithmetic; here a rank waits only for the wire, but reduces the whole
// buffer instead of half. Operands are in rank order, so both ranks get the same bits as with the direct algorithm.
void mesh_all_reduce_exchange(Exchange& exchange, const Operation& operation) {
  constexpr std::size_t kSlots = 4;  // chunks in transit to this rank; with their operands they fit a core's cache
  if (exchange.size() != 2) return mesh_all_reduce_direct(exchange, operation);
  const int rank = exchange.rank();
  const int peer = 1 - rank;
  const std::size_t element = operation.element();
  const Chunks chunks{{0, operation.count}, chunk_elements(operation.count, element)};
  const std::size_t slot_bytes = chunks.each * element;
  const std::span<std::byte> scratch = exchange.scratch(kSlots * slot_bytes);
  const auto slot = [&](std::size_t c) { return scratch.data() + c % kSlots * slot_bytes; };
  const auto bytes_of = [&](std::size_t c) { return chunks.at(c).count * element; };

  std::vector<Exchange::Ticket> receives(chunks.count());
  std::vector<Exchange::Ticket> sends(chunks.count());
  const auto post_receive = [&](std::size_t c) { receives[c] = exchange.recv(peer, {slot(c), bytes_of(c)}); };
  for (std::size_t c = 0; c < chunks.count() && c < kSlots; ++c) post_receive(c);
  for (std::size_t c = 0; c < chunks.count(); ++c) {
    sends[c] = exchange.send(peer, bytes_at(operation.in, element, chunks.at(c)));
  }
  const Reduction reduction = reduction_of(operation, 2);
  for (std::size_t c = 0; c < chunks.count(); ++c) {
    const Slice slice = chunks.at(c);
    exchange.wait(receives[c]);
    exchange.wait(sends[c]);  // the result may take the operand's place
    if (slice.count > 0) {
      const void* own = operation.in + slice.offset * element;
      const void* const sources[2] = {rank == 0 ? own : slot(c), rank == 0 ? slot(c) : own};
      void* const destination = operation.out + slice.offset * element;
      reduce(reduction, sources, {&destination, 1}, slice.count);
    }
    if (c + kSlots < chunks.count()) post_receive(c + kSlots);
  }
  exchange.wait_all();
}

// all_reduce, ring: slices are reduced round the ring, then distributed round it (see slices.h).
//
// 2 (n-1) steps; each rank sends and receives 2 (n-1)/n B, all between neighbours. All ranks get the same bits, as each
// slice is computed once. Sums of 16-bit numbers use the direct algorithm, which rounds only once.
void mesh_all_reduce_ring(Exchange& exchange, const Operation& operation) {
  if (rounds_partial_results(operation)) return mesh_all_reduce_direct(exchange, operation);
  const Parts slices = even_parts(operation.count, exchange.size());
  post_headers(exchange);
  ring_reduce_slices(exchange, operation, slices, operation.out + slices.offset(exchange.rank()) * operation.element());
  ring_gather_slices(exchange, operation.out, slices, operation.element());
}

// all_reduce, tree: reduces up a binomial tree to rank 0 (see mesh_reduce_tree), then broadcasts down the tree.
//
// 2 log2(n) steps and connections to log2(n) ranks, so a thousand ranks need ten connections each instead of a
// thousand. All ranks get rank 0's bits. Sums of 16-bit numbers use the direct reduce to rank 0, which rounds only
// once.
void mesh_all_reduce_tree(Exchange& exchange, const Operation& operation) {
  Operation rooted = operation;
  rooted.root = 0;
  mesh_reduce_tree(exchange, rooted);
  mesh_broadcast_tree(exchange, rooted);
}

}  // namespace maniple
