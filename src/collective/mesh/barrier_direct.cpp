// barrier, direct: everyone sends everyone a header. One step; n-1 messages sent by each rank.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "topology/rank_arithmetic.h"

namespace maniple {

void mesh_barrier_direct(Exchange& exchange, const Operation&) {
  const int rank = exchange.rank();
  const int size = exchange.size();
  for (int distance = 1; distance < size; ++distance) recv_header(exchange, ring_rank(rank, -distance, size));
  for (int distance = 1; distance < size; ++distance) send_header(exchange, ring_rank(rank, distance, size));
  exchange.wait_all();
}

}  // namespace maniple
