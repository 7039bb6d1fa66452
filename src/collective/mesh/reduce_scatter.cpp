// reduce_scatter over the mesh: direct, ring. n ranks, buffer of B bytes.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/chunks.h"
#include "collective/mesh/ring.h"
#include "collective/mesh/slices.h"
#include "collective/reduce/reduce.h"

namespace maniple {

// reduce_scatter, direct: everyone sends each rank its part; the owner reduces the parts in rank order.
//
// One step; every rank sends (n-1)/n B and receives (n-1) times its own part, chunk by chunk (see slices.h).
void mesh_reduce_scatter_direct(Exchange& exchange, const Operation& operation) {
  const bool covers = result_covers_other_input(operation, exchange.rank());
  const auto own = reduce_by_slices(exchange, {.in = operation.in,
                                               .slices = operation.parts,
                                               .reduction = reduction_of(operation, exchange.size()),
                                               .own = covers ? nullptr : operation.out});
  move_bytes(operation.out, own.data(), own.size());
}

// reduce_scatter, ring: partial results travel round the ring to the owner of the part (see ring.h).
//
// n-1 steps; (n-1)/n B sent by each rank and the same received, all between neighbours. Sums of 16-bit numbers use the
// direct algorithm, which rounds only once.
void mesh_reduce_scatter_ring(Exchange& exchange, const Operation& operation) {
  if (rounds_partial_results(operation)) return mesh_reduce_scatter_direct(exchange, operation);
  post_headers(exchange);
  const bool covers = result_covers_other_input(operation, exchange.rank());
  const auto own = ring_reduce_slices(exchange, operation, operation.parts, covers ? nullptr : operation.out);
  exchange.wait_all();
  move_bytes(operation.out, own.data(), own.size());
}

}  // namespace maniple
