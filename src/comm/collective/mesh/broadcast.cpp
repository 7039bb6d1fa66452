// broadcast over the mesh: direct, tree, scatter_gather. n ranks, buffer of B bytes.
#include "comm/collective/algorithms.h"
#include "comm/collective/mesh/slices.h"

#include <algorithm>
#include <vector>

namespace maniple {

// broadcast, direct: the root sends the buffer to every rank; the others exchange headers. One step; the root sends
// (n-1) B.
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

// broadcast, tree: chunks travel down a binomial tree from the root, forwarded as they arrive.
//
// log2(n) steps; the root sends log2(n) B. Every rank receives B once.
void mesh_broadcast_tree(Exchange& exchange, const Operation& operation) {
  const BinomialTree tree = binomial_tree(exchange.rank(), operation.root, exchange.size());
  const std::size_t element = operation.element();
  const Chunks chunks{{0, operation.count}, chunk_elements(operation.count, element)};
  post_headers(exchange);

  std::vector<Exchange::Ticket> receives;
  if (tree.parent >= 0) {
    for (std::size_t c = 0; c < chunks.count(); ++c) {
      receives.push_back(exchange.recv(tree.parent, bytes_at(operation.out, element, chunks.at(c))));
    }
  }
  for (std::size_t c = 0; c < chunks.count(); ++c) {
    if (tree.parent >= 0) exchange.wait(receives[c]);
    // The largest subtree first, as it has the longest path.
    for (auto child = tree.children.rbegin(); child != tree.children.rend(); ++child) {
      exchange.send(*child, bytes_at(operation.out, element, chunks.at(c)));
    }
  }
  exchange.wait_all();
}

// broadcast, scatter_gather: the root sends each other rank one slice, and that rank forwards its chunks to the rest as
// they arrive.
//
// Two steps; the root sends B in all (`direct`: (n-1) B), the others (n-2)/(n-1) B. All receive B once.
void mesh_broadcast_scatter_gather(Exchange& exchange, const Operation& operation) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  const int slices = std::max(size - 1, 1);
  const std::size_t element = operation.element();
  const std::size_t chunk = chunk_elements(slice_of(operation.count, slices, 0).count, element);
  const auto chunks_of = [&](int owner) {  // the root owns no slice; the others own slices in ring order after it
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
