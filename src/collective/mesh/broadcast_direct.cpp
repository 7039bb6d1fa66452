// broadcast, direct: the root sends all to everyone; the others exchange headers. One step; (n-1) B sent by the root.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/memory.h"

namespace maniple {

void mesh_broadcast_direct(Exchange& exchange, const Operation& operation) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const std::span<std::byte> all = bytes_at(operation.out, operation.element(), {0, operation.count});
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, -distance, size);
    exchange.recv(peer, peer == operation.root ? all : std::span<std::byte>());
  }
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, distance, size);
    exchange.send(peer, rank == operation.root ? all : std::span<std::byte>());
  }
  exchange.wait_all();
}

}  // namespace maniple
