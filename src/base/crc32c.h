// CRC-32C (Castagnoli), the check of data that crosses a network.
#pragma once

#include <cstddef>
#include <cstdint>

namespace maniple {

/// The check value of `size` bytes that follow those whose value is `seed` (0 to begin with):
/// crc32c(crc32c(0, a), b) is the value of a and b together. crc32c of "123456789" is 0xe3069283.
std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t size) noexcept;

/// The ways it can be computed, of which `crc32c` takes the fastest that the processor has. For tests.
std::uint32_t crc32c_tables(std::uint32_t seed, const void* data, std::size_t size) noexcept;
std::uint32_t crc32c_hardware(std::uint32_t seed, const void* data, std::size_t size) noexcept;
bool crc32c_has_hardware() noexcept;
std::uint32_t crc32c_wide(std::uint32_t seed, const void* data, std::size_t size) noexcept;
bool crc32c_has_wide() noexcept;

}  // namespace maniple
