// reduce_scatter, ring: partial results travel round the ring to the owner of the part (see ring.h).
//
// n-1 steps; (n-1)/n B sent by each rank and the same received, all between neighbours. Sums of 16-bit numbers go the
// direct way, which rounds only once.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "collective/mesh/memory.h"
#include "collective/mesh/reduction.h"
#include "collective/mesh/ring.h"

namespace maniple {

void mesh_reduce_scatter_ring(Exchange& exchange, const Operation& operation) {
  if (rounds_partial_results(operation)) return mesh_reduce_scatter_direct(exchange, operation);
  post_headers(exchange);
  const bool covers = result_covers_other_input(operation, exchange.rank());
  const auto own = ring_reduce_slices(exchange, operation, operation.parts, covers ? nullptr : operation.out);
  exchange.wait_all();
  move_bytes(operation.out, own.data(), own.size());
}

}  // namespace maniple
