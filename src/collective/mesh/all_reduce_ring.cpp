// all_reduce, ring: slices are reduced round the ring, then spread round it (see ring.h).
//
// 2 (n-1) steps; 2 (n-1)/n B sent by each rank and the same received, all between neighbours. All ranks get the same
// bits, because each slice is computed once. Sums of 16-bit numbers go the direct way, which rounds only once.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "collective/mesh/memory.h"
#include "collective/mesh/reduction.h"
#include "collective/mesh/ring.h"

namespace maniple {

void mesh_all_reduce_ring(Exchange& exchange, const Operation& operation) {
  if (rounds_partial_results(operation)) return mesh_all_reduce_direct(exchange, operation);
  const Parts slices = even_parts(operation.count, exchange.size());
  post_headers(exchange);
  ring_reduce_slices(exchange, operation, slices, operation.out + slices.offset(exchange.rank()) * operation.element());
  ring_gather_slices(exchange, operation.out, slices, operation.element());
}

}  // namespace maniple
