// all_gather, ring: every part travels once round the ring (see ring.h).
//
// n-1 steps; every rank sends all parts but that of the next rank, all between neighbours.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "collective/mesh/memory.h"
#include "collective/mesh/ring.h"

namespace maniple {

void mesh_all_gather_ring(Exchange& exchange, const Operation& operation) {
  const std::span<std::byte> own =
      bytes_at(operation.out, operation.element(), part_of(operation.parts, exchange.rank()));
  move_bytes(own.data(), operation.in, own.size());
  post_headers(exchange);
  ring_gather_slices(exchange, operation.out, operation.parts, operation.element());
}

}  // namespace maniple
