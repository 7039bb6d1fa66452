// broadcast, scatter_gather: the root sends each other rank one slice, and that rank passes it on to the rest, chunk by
// chunk as it comes.
//
// Two steps; the root sends B in all (where `direct` sends (n-1) B), the others (n-2)/(n-1) B. All receive B once.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "collective/mesh/memory.h"

#include <algorithm>
#include <vector>

namespace maniple {

void mesh_broadcast_scatter_gather(Exchange& exchange, const Operation& operation) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const int slices = std::max(size - 1, 1);
  const std::size_t element = operation.element();
  const std::size_t chunk = chunk_elements(slice_of(operation.count, slices, 0).count, element);
  const auto chunks_of = [&](int owner) {  // the root owns none; the others follow it round the ring
    return Chunks{slice_of(operation.count, slices, ring_rank(owner, -operation.root - 1, size)), chunk};
  };
  const auto bytes = [&](int owner, std::size_t c) { return bytes_at(operation.out, element, chunks_of(owner).at(c)); };
  post_headers(exchange);

  if (rank == operation.root) {
    for (std::size_t c = 0; size > 1 && c < chunks_of(ring_rank(rank, 1, size)).count(); ++c) {
      for (int distance = 1; distance < size; ++distance) {
        const int owner = ring_rank(rank, distance, size);
        if (c < chunks_of(owner).count()) exchange.send(owner, bytes(owner, c));
      }
    }
  } else {
    std::vector<Exchange::Ticket> own;
    for (std::size_t c = 0; c < chunks_of(rank).count(); ++c)
      own.push_back(exchange.recv(operation.root, bytes(rank, c)));
    for (int owner = 0; owner < size; ++owner) {
      if (owner == rank || owner == operation.root) continue;
      for (std::size_t c = 0; c < chunks_of(owner).count(); ++c) exchange.recv(owner, bytes(owner, c));
    }
    for (std::size_t c = 0; c < own.size(); ++c) {
      exchange.wait(own[c]);
      for (int distance = 1; distance < size; ++distance) {
        const int peer = ring_rank(rank, distance, size);
        if (peer != operation.root) exchange.send(peer, bytes(rank, c));
      }
    }
  }
  exchange.wait_all();
}

}  // namespace maniple
