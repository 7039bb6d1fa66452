#include "train/ddp/hooks/block_quantize.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

namespace maniple {
namespace {

/// To the nearest whole number, for magnitudes below 2^22; unlike std::nearbyint it is two additions on every processor.
float rounded(float x) noexcept {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: no room for fractions behind it
  return (x + kMagic) - kMagic;
}

float scale_of(std::span<const float> numbers) noexcept {
  float largest = 0;
  int bad = 0;
  for (const float x : numbers) {
    const float magnitude = std::fabs(x);
    bad |= magnitude <= FLT_MAX ? 0 : 1;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (bad != 0) return std::numeric_limits<float>::quiet_NaN();
  return largest < kSmallestBlock ? 0 : largest / 127;
}

}  // namespace

void quantize_blocks(std::span<const float> numbers, std::size_t block, std::span<std::uint8_t> coded) {
  const std::size_t blocks = blocks_of(numbers.size(), block);
  std::uint8_t* scales = coded.data();
  auto* bytes = reinterpret_cast<std::int8_t*>(coded.data() + 4 * blocks);
  for (std::size_t b = 0; b < blocks; ++b, bytes += block) {
    const auto own = numbers.subspan(b * block, std::min(block, numbers.size() - b * block));
    const float scale = scale_of(own);
    std::memcpy(scales + 4 * b, &scale, 4);
    if (!(scale > 0)) {
      std::memset(bytes, 0, block);
      continue;
    }
    const float inverse = 1 / scale;
    for (std::size_t i = 0; i < own.size(); ++i) {
      bytes[i] = static_cast<std::int8_t>(std::clamp(rounded(own[i] * inverse), -127.0f, 127.0f));
    }
    std::memset(bytes + own.size(), 0, block - own.size());
  }
}

void add_quantized(std::span<const std::uint8_t> coded, std::size_t block, std::span<float> numbers) {
  const std::size_t blocks = blocks_of(numbers.size(), block);
  const auto* bytes = reinterpret_cast<const std::int8_t*>(coded.data() + 4 * blocks);
  for (std::size_t b = 0; b < blocks; ++b, bytes += block) {
    float scale = 0;
    std::memcpy(&scale, coded.data() + 4 * b, 4);
    const auto own = numbers.subspan(b * block, std::min(block, numbers.size() - b * block));
    for (std::size_t i = 0; i < own.size(); ++i) own[i] += scale * static_cast<float>(bytes[i]);
  }
}

}  // namespace maniple
