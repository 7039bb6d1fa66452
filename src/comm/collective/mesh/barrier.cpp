// Exchanges of frames without payload over the mesh: the header round, and barrier (direct, dissemination).
#include <set>

#include "comm/base/rank_arithmetic.h"
#include "comm/collective/algorithms.h"

namespace maniple {

void post_headers(Exchange& exchange) {
  constexpr int kAllPairs = 64;
  const int size = exchange.size();
  const int rank = exchange.rank();
  std::set<int> peers;
  if (size <= kAllPairs) {
    for (int step = 1; step < size; ++step) peers.insert(ring_rank(rank, step, size));
  } else {
    for (const int distance : doubling_distances(size)) {
      peers.insert(ring_rank(rank, distance, size));
      peers.insert(ring_rank(rank, -distance, size));
    }
  }
  for (const int peer : peers) recv_header(exchange, peer);
  for (const int peer : peers) send_header(exchange, peer);
}

// barrier, direct: every rank sends a header to all others. One step; each rank sends n-1 frames.
void mesh_barrier_direct(Exchange& exchange, const Operation&) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  for (int distance = 1; distance < size; ++distance) recv_header(exchange, ring_rank(rank, -distance, size));
  for (int distance = 1; distance < size; ++distance) send_header(exchange, ring_rank(rank, distance, size));
  exchange.wait_all();
}

// barrier, dissemination: in step k every rank sends a header to the rank 2^k ahead, which thereby learns of 2^k more
// arrivals. After log2(n) steps every rank knows of all. Each rank sends log2(n) frames over 2 log2(n) connections,
// where `direct` needs 2(n-1).
void mesh_barrier_dissemination(Exchange& exchange, const Operation&) {
  for (const int distance : doubling_distances(exchange.size())) {
    recv_header(exchange, ring_rank(exchange.rank(), -distance, exchange.size()));
    send_header(exchange, ring_rank(exchange.rank(), distance, exchange.size()));
    exchange.wait_all();
  }
}

}  // namespace maniple
