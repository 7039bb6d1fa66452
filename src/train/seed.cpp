#include <maniple/train/seed.h>

#include <torch/torch.h>

namespace maniple {

namespace {

// SplitMix64's finaliser (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs.
std::uint64_t mixed(std::uint64_t x) noexcept {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

std::uint64_t seed_all(std::uint64_t seed, std::uint64_t stream) {
  // Stream 0 is the seed itself, so that a program on one rank draws what plain LibTorch would draw.
  const std::uint64_t given = stream == 0 ? seed : mixed(seed + 0x9e3779b97f4a7c15u * stream);
  torch::manual_seed(given);
  return given;
}

}  // namespace maniple
