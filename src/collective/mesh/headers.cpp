#include "collective/mesh/headers.h"

#include <algorithm>
#include <set>

#include "topology/rank_arithmetic.h"

namespace maniple {
namespace {
constexpr int kAllPairs = 64;
}

void send_header(Exchange& exchange, int peer) { exchange.send(peer, {}); }
void recv_header(Exchange& exchange, int peer) { exchange.recv(peer, {}); }

void post_headers(Exchange& exchange) {
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

}  // namespace maniple
