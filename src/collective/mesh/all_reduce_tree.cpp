// all_reduce, tree: up a binomial tree to rank 0 (see mesh_reduce_tree.cpp), and down again.
//
// 2 log2(n) steps and connections to log2(n) ranks, so a thousand ranks need ten connections each and not a thousand. All ranks get
// the same bits, those of rank 0. Sums of 16-bit numbers are all sent to rank 0 when they are few: it rounds only once.
#include "collective/mesh/algorithms.h"

namespace maniple {

void mesh_all_reduce_tree(Exchange& exchange, const Operation& operation) {
  Operation rooted = operation;
  rooted.root = 0;
  mesh_reduce_tree(exchange, rooted);
  mesh_broadcast_tree(exchange, rooted);
}

}  // namespace maniple
