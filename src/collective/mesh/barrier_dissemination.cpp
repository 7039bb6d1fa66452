// barrier, dissemination: in step k everyone tells the rank 2^k ahead that it knows of 2^k arrivals. After log2(n)
// steps each knows of all. log2(n) messages sent by each rank, over 2 log2(n) connections where `direct` needs 2(n-1).
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "topology/rank_arithmetic.h"

namespace maniple {

void mesh_barrier_dissemination(Exchange& exchange, const Operation&) {
  for (const int distance : doubling_distances(exchange.size())) {
    recv_header(exchange, ring_rank(exchange.rank(), -distance, exchange.size()));
    send_header(exchange, ring_rank(exchange.rank(), distance, exchange.size()));
    exchange.wait_all();
  }
}

}  // namespace maniple
