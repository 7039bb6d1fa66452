// CRC-32C (Castagnoli), the checksum of frames.
#pragma once

#include <cstddef>
#include <cstdint>

namespace maniple {

/// Of `seed`'s bytes followed by these: crc32c(crc32c(0, a), b) is that of a and b together.
std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t size);

}  // namespace maniple
