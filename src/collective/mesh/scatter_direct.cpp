// scatter, direct: the root sends each rank its part; the others send headers. One step; the root sends all.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "collective/mesh/memory.h"

namespace maniple {

void mesh_scatter_direct(Exchange& exchange, const Operation& operation) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const std::size_t element = operation.element();
  const bool is_root = rank == operation.root;
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, -distance, size);
    exchange.recv(peer, peer == operation.root ? bytes_at(operation.out, element, {0, operation.parts.count(rank)})
                                               : std::span<std::byte>());
  }
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, distance, size);
    exchange.send(
        peer, is_root ? bytes_at(operation.in, element, part_of(operation.parts, peer)) : std::span<const std::byte>());
  }
  exchange.wait_all();
  // Last, because in place it overwrites what was to be sent.
  if (is_root) {
    const std::span<const std::byte> own = bytes_at(operation.in, element, part_of(operation.parts, rank));
    move_bytes(operation.out, own.data(), own.size());
  }
}

}  // namespace maniple
