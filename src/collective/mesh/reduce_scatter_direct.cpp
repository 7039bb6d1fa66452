// reduce_scatter, direct: everyone sends each rank its part; the owner reduces the parts in rank order.
//
// One step; every rank sends (n-1)/n B and receives (n-1) times its own part, chunk by chunk (see slices.h).
#include "collective/mesh/algorithms.h"
#include "collective/mesh/memory.h"
#include "collective/mesh/reduction.h"
#include "collective/mesh/slices.h"

namespace maniple {

void mesh_reduce_scatter_direct(Exchange& exchange, const Operation& operation) {
  const bool covers = result_covers_other_input(operation, exchange.rank());
  const auto own = reduce_by_slices(exchange, {.in = operation.in,
                                               .slices = operation.parts,
                                               .reduction = whole_reduction(operation, exchange.size()),
                                               .own = covers ? nullptr : operation.out});
  move_bytes(operation.out, own.data(), own.size());
}

}  // namespace maniple
