// Who talks to whom, as pure arithmetic on rank numbers: rings, binomial trees, slices.
#pragma once

#include <cstddef>
#include <vector>

namespace maniple {

/// `rank + steps` around a ring of `size`; steps may be negative and of any magnitude.
constexpr int ring_rank(int rank, long steps, int size) noexcept {
  const long moved = (rank + steps) % size;
  return static_cast<int>(moved < 0 ? moved + size : moved);
}

/// A binomial tree over the ranks, rotated so that `root` is its root. Counted from the root, the node v holds in its
/// subtree exactly the consecutive nodes [v, v + span), so reducing children in order keeps the order of ranks.
struct BinomialTree {
  int parent = -1;            ///< -1: this rank is the root
  std::vector<int> children;  ///< nearest (smallest subtree) first
};
BinomialTree binomial_tree(int rank, int root, int size);

/// The distances 1, 2, 4, ... below `size`: everyone linked to the ranks this far away is connected in log2 steps.
std::vector<int> doubling_distances(int size);

/// The i-th of `slices` slices of `total` elements, as equal as can be; the longer ones come first.
struct Slice {
  std::size_t offset = 0;
  std::size_t count = 0;
  friend bool operator==(const Slice&, const Slice&) = default;
};
constexpr Slice slice_of(std::size_t total, int slices, int i) noexcept {
  const auto n = static_cast<std::size_t>(slices);
  const auto k = static_cast<std::size_t>(i);
  const std::size_t each = total / n;
  const std::size_t longer = total % n;
  return {k * each + (k < longer ? k : longer), each + (k < longer ? 1 : 0)};
}

}  // namespace maniple
