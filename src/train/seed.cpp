#include <maniple/train/seed.h>

#include <torch/torch.h>

#include "train/data/split_mix.h"

namespace maniple {

std::uint64_t seed_all(std::uint64_t seed, std::uint64_t stream) {
  // Stream 0 is the seed itself, so that a program on one rank draws what plain LibTorch would draw.
  const std::uint64_t given = stream == 0 ? seed : mixed(seed + SplitMix::kStep * stream);
  torch::manual_seed(given);
  return given;
}

}  // namespace maniple
