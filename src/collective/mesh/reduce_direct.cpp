// reduce, direct: operands in rank order.
//
// Small buffers: everyone sends all to the root, which reduces. One step; B sent by each rank.
// Others: by slices (see slices.h): each rank reduces its slice and sends it to the root. Two steps; every rank
// sends B and receives (n-1)/n B, the root receives 2 (n-1)/n B, so the root's link is no bottleneck.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/memory.h"
#include "collective/mesh/reduction.h"
#include "collective/mesh/slices.h"

namespace maniple {

void mesh_reduce_direct(Exchange& exchange, const Operation& operation) {
  using Audience = SliceWork::Audience;
  if (operation.bytes() <= kSmallReduceBytes) return reduce_at_once(exchange, operation, Audience::root);
  const bool is_root = exchange.rank() == operation.root;
  const Parts slices = even_parts(operation.count, exchange.size());
  reduce_by_slices(exchange,
                   {.in = operation.in,
                    .slices = slices,
                    .reduction = whole_reduction(operation, exchange.size()),
                    .own = is_root ? operation.out + slices.offset(exchange.rank()) * operation.element() : nullptr,
                    .all = is_root ? operation.out : nullptr,
                    .audience = Audience::root,
                    .root = operation.root});
}

}  // namespace maniple
