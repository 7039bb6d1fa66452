// all_gather over the mesh: direct, ring.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/chunks.h"
#include "collective/mesh/ring.h"

namespace maniple {

// all_gather, direct: everyone sends its part to everyone. One step; (n-1) times its part sent by each rank.
void mesh_all_gather_direct(Exchange& exchange, const Operation& operation) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const auto part = [&](int peer) {
    return bytes_at(operation.out, operation.element(), part_of(operation.parts, peer));
  };
  const std::span<std::byte> own = part(rank);
  move_bytes(own.data(), operation.in, own.size());
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, -distance, size);
    exchange.recv(peer, part(peer));
  }
  for (int distance = 1; distance < size; ++distance) exchange.send(ring_rank(rank, distance, size), own);
  exchange.wait_all();
}

// all_gather, ring: every part travels once round the ring (see ring.h).
//
// n-1 steps; every rank sends all parts but that of the next rank, all between neighbours.
void mesh_all_gather_ring(Exchange& exchange, const Operation& operation) {
  const std::span<std::byte> own =
      bytes_at(operation.out, operation.element(), part_of(operation.parts, exchange.rank()));
  move_bytes(own.data(), operation.in, own.size());
  post_headers(exchange);
  ring_gather_slices(exchange, operation.out, operation.parts, operation.element());
}

}  // namespace maniple
