// gather, direct: everyone sends its part to the root, and a header to the others. One step; the root receives all.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "collective/mesh/memory.h"

namespace maniple {

void mesh_gather_direct(Exchange& exchange, const Operation& operation) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const std::size_t element = operation.element();
  const bool is_root = rank == operation.root;
  if (is_root) {
    const std::span<std::byte> own = bytes_at(operation.out, element, part_of(operation.parts, rank));
    move_bytes(own.data(), operation.in, own.size());
  }
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, -distance, size);
    exchange.recv(peer,
                  is_root ? bytes_at(operation.out, element, part_of(operation.parts, peer)) : std::span<std::byte>());
  }
  for (int distance = 1; distance < size; ++distance) {
    const int peer = ring_rank(rank, distance, size);
    if (peer != operation.root) send_header(exchange, peer);
  }
  if (!is_root) exchange.send(operation.root, bytes_at(operation.in, element, {0, operation.parts.count(rank)}));
  exchange.wait_all();
}

}  // namespace maniple
