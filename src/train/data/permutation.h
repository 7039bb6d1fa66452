// A random order of 0 .. n-1 that depends on the seed alone: the same on every platform and with every standard library, because
// neither std::shuffle nor torch::randperm promises that. Fisher and Yates' shuffle, from the end, with numbers from SplitMix64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "train/data/split_mix.h"

namespace maniple {

/// `Index` must hold n - 1; which type it is does not change the order. Takes n * sizeof(Index) bytes.
template <class Index>
std::vector<Index> random_order(std::size_t n, std::uint64_t seed) {
  std::vector<Index> order(n);
  std::iota(order.begin(), order.end(), Index{0});
  SplitMix random(seed);
  for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

}  // namespace maniple
