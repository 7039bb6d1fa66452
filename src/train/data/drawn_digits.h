// Digits for when there are no files: drawn from a font of 5 x 7 points, moved, scaled, slanted, with strokes of different strength
// and noise. Deterministic; no LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "train/data/idx.h"

namespace maniple {

/// 28 x 28 pixels each, all ten digits equally often (but for the remainder) and in random order.
LabelledImages draw_digits(std::size_t count, std::uint64_t seed);

}  // namespace maniple
