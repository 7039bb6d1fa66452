// SplitMix64 (Steele, Lea, Flood 2014): a small random generator with the same output on every platform.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace maniple {

/// SplitMix64's finaliser: neighbouring inputs give unrelated outputs.
constexpr std::uint64_t mixed(std::uint64_t x) noexcept {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class SplitMix {
 public:
  static constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15u;

  explicit constexpr SplitMix(std::uint64_t seed) noexcept : state_(seed) {}

  constexpr std::uint64_t next() noexcept { return mixed(state_ += kStep); }

  /// Uniform in [0, bound). Numbers from the last, incomplete range are drawn again, which avoids the bias of a bare
  /// remainder.
  constexpr std::uint64_t below(std::uint64_t bound) noexcept {
    const std::uint64_t incomplete = (0 - bound) % bound;  // 2^64 mod bound
    std::uint64_t number = next();
    while (number < incomplete) number = next();
    return number % bound;
  }

  /// Uniform in [0, 1).
  constexpr double unit() noexcept { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

/// A random order of 0 .. n-1 that depends only on the seed. It is the same on every platform and with every standard
/// library, which neither std::shuffle nor torch::randperm promises. Fisher-Yates shuffle, from the end. `Index` must
/// hold n - 1; the choice of type does not change the order. Takes n * sizeof(Index) bytes.
template <class Index>
std::vector<Index> random_order(std::size_t n, std::uint64_t seed) {
  std::vector<Index> order(n);
  std::iota(order.begin(), order.end(), Index{0});
  SplitMix random(seed);
  for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

}  // namespace maniple
