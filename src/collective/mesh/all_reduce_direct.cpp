// all_reduce, direct: two ways, both with the operands in rank order, so that the result does not depend on the way.
//
// Small buffers: everyone sends all to everyone and reduces redundantly. One step; (n-1) B sent by each rank.
// Others: by slices (see slices.h), an all-gather of the reduced slices running behind the reduce-scatter. Two
// steps; 2 (n-1)/n B sent by each rank and the same received, which is the least possible.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/memory.h"
#include "collective/mesh/reduction.h"
#include "collective/mesh/slices.h"

namespace maniple {

void mesh_all_reduce_direct(Exchange& exchange, const Operation& operation) {
  using Audience = SliceWork::Audience;
  if (operation.bytes() <= kSmallReduceBytes) return reduce_at_once(exchange, operation, Audience::everyone);
  const Parts slices = even_parts(operation.count, exchange.size());
  reduce_by_slices(exchange, {.in = operation.in,
                              .slices = slices,
                              .reduction = whole_reduction(operation, exchange.size()),
                              .own = operation.out + slices.offset(exchange.rank()) * operation.element(),
                              .all = operation.out,
                              .audience = Audience::everyone});
}

}  // namespace maniple
