#include "topology/rank_arithmetic.h"

namespace maniple {

BinomialTree binomial_tree(int rank, int root, int size) {
  const int node = ring_rank(rank, -root, size);
  BinomialTree tree;
  // A node's parent is itself without its lowest set bit; its children add each lower bit.
  for (int bit = 1; bit < size; bit <<= 1) {
    if ((node & bit) != 0) {
      tree.parent = ring_rank(node - bit, root, size);
      break;
    }
    if (node + bit < size) tree.children.push_back(ring_rank(node + bit, root, size));
  }
  return tree;
}

std::vector<int> doubling_distances(int size) {
  std::vector<int> distances;
  for (int distance = 1; distance < size; distance <<= 1) distances.push_back(distance);
  return distances;
}

}  // namespace maniple
