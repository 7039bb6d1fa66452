// Communication patterns as pure arithmetic on rank numbers: rings, binomial trees, slices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace maniple {

/// `rank + steps` around a ring of `size`; steps may be negative and of any magnitude.
constexpr int ring_rank(int rank, long steps, int size) noexcept {
  const long moved = (rank + steps) % size;
  return static_cast<int>(moved < 0 ? moved + size : moved);
}

/// A binomial tree over the ranks, rotated so that `root` is its root. Numbering nodes from the root, the subtree of
/// node v holds exactly the consecutive nodes [v, v + span), so reducing children in order preserves rank order.
struct BinomialTree {
  int parent = -1;            ///< -1: this rank is the root
  std::vector<int> children;  ///< nearest (smallest subtree) first
};
inline BinomialTree binomial_tree(int rank, int root, int size) {
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

/// The distances 1, 2, 4, ... below `size`: if every rank is linked to the ranks at these distances, any two ranks are
/// log2(size) steps apart.
inline std::vector<int> doubling_distances(int size) {
  std::vector<int> distances;
  for (int distance = 1; distance < size; distance <<= 1) distances.push_back(distance);
  return distances;
}

/// The i-th of `slices` nearly equal slices of `total` elements; the longer slices come first.
struct Slice {
  std::size_t offset = 0;
  std::size_t count = 0;
  friend bool operator==(const Slice&, const Slice&) = default;
};
constexpr Slice slice_of(std::size_t total, int slices, int i) noexcept {
  const std::size_t k = i, each = total / slices, longer = total % slices;
  return {k * each + (k < longer ? k : longer), each + (k < longer ? 1 : 0)};
}

/// A buffer cut into one slice per rank on cache-line boundaries, so that ranks do not write to each other's lines.
class Slices {
 public:
  Slices(std::size_t count, std::size_t element, int ranks) noexcept : count_(count) {
    const std::size_t line = std::max<std::size_t>(1, 64 / element);
    each_ = ((count + ranks - 1) / ranks + line - 1) / line * line;
  }
  std::size_t begin(int rank) const noexcept { return std::min(count_, each_ * rank); }
  std::size_t end(int rank) const noexcept { return std::min(count_, each_ * (rank + 1)); }
  std::size_t size(int rank) const noexcept { return end(rank) - begin(rank); }

 private:
  std::size_t count_;
  std::size_t each_;
};

}  // namespace maniple
