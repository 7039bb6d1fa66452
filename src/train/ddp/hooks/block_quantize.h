// Numbers as 8-bit integers with a scale for each block; without LibTorch.
//
// A block of B numbers is coded as a scale (float32) and B signed bytes: x = scale * byte. The last block may be short; it
// is coded as if zeros followed. A block with a number that is not finite has the scale NaN, so that it decodes to NaNs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace maniple {

/// Blocks below this magnitude count as zeros: their scale would not be a normal number.
inline constexpr float kSmallestBlock = 1.5e-36f;

constexpr std::size_t blocks_of(std::size_t numbers, std::size_t block) noexcept {
  return (numbers + block - 1) / block;
}

/// Bytes of so many coded blocks: all scales, then all bytes.
constexpr std::size_t coded_bytes(std::size_t blocks, std::size_t block) noexcept { return blocks * (4 + block); }

/// `coded` has coded_bytes(blocks_of(numbers.size(), block), block) bytes.
void quantize_blocks(std::span<const float> numbers, std::size_t block, std::span<std::uint8_t> coded);

/// Adds the coded numbers to `numbers`, which has as many as were coded.
void add_quantized(std::span<const std::uint8_t> coded, std::size_t block, std::span<float> numbers);

}  // namespace maniple
