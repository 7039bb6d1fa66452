// SplitMix64 (Steele, Lea, Flood 2014): a small generator whose numbers are the same everywhere.
#pragma once

#include <cstdint>

namespace maniple {

/// Its finaliser: neighbouring inputs give unrelated outputs.
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

  /// Uniform in [0, bound), without the bias of a bare remainder: numbers from the last, incomplete stretch are drawn again.
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

}  // namespace maniple
