// all_to_all, direct: everyone sends everyone its part, starting with the next rank, so that nobody is flooded by all
// at once. One step; every rank sends and receives all parts but its own.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/memory.h"

namespace maniple {

void mesh_all_to_all_direct(Exchange& exchange, const Operation& operation) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const std::size_t element = operation.element();
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, -distance, size);
    exchange.recv(peer, bytes_at(operation.out, element, part_of(operation.out_parts, peer)));
  }
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, distance, size);
    exchange.send(peer, bytes_at(operation.in, element, part_of(operation.in_parts, peer)));
  }
  const std::span<const std::byte> own = bytes_at(operation.in, element, part_of(operation.in_parts, rank));
  move_bytes(operation.out + operation.out_parts.offset(rank) * element, own.data(), own.size());
  exchange.wait_all();
}

}  // namespace maniple
