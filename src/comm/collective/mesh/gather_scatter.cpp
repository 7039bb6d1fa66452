// gather, scatter and all_to_all over the mesh (direct), and all_gather (direct, ring).
#include "comm/collective/algorithms.h"
#include "comm/collective/mesh/slices.h"

namespace maniple {

// gather, direct: every rank sends its part to the root, and headers to the others. One step; the root receives all
// parts.
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

// scatter, direct: the root sends each rank its part; the others send headers. One step; the root sends all parts.
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
  // Last, because in place this overwrites data still to be sent.
  if (is_root) {
    const std::span<const std::byte> own = bytes_at(operation.in, element, part_of(operation.parts, rank));
    move_bytes(operation.out, own.data(), own.size());
  }
}

// all_to_all, direct: every rank sends every other its part, starting with the next rank, so that no rank receives from
// all at once. One step; every rank sends and receives all parts but its own.
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

// all_gather, direct: every rank sends its part to all others. One step; each rank sends its part n-1 times.
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

// all_gather, ring: every part travels once round the ring (see slices.h).
//
// n-1 steps; every rank sends all parts but the next rank's, all between neighbours.
void mesh_all_gather_ring(Exchange& exchange, const Operation& operation) {
  const std::span<std::byte> own =
      bytes_at(operation.out, operation.element(), part_of(operation.parts, exchange.rank()));
  move_bytes(own.data(), operation.in, own.size());
  post_headers(exchange);
  ring_gather_slices(exchange, operation.out, operation.parts, operation.element());
}

}  // namespace maniple
