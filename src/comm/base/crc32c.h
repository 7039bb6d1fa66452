// CRC-32C (Castagnoli), the checksum of data sent over a network.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// The checksum of `size` bytes appended to data whose checksum is `seed` (0 at the start): crc32c(crc32c(0, a), b) is
/// the checksum of a followed by b. crc32c of "123456789" is 0xe3069283.
std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t size) noexcept;

/// The implementations; `crc32c` picks the fastest that the processor supports. For tests.
std::uint32_t crc32c_tables(std::uint32_t seed, const void* data, std::size_t size) noexcept;
std::uint32_t crc32c_hardware(std::uint32_t seed, const void* data, std::size_t size) noexcept;
bool crc32c_has_hardware() noexcept;
std::uint32_t crc32c_wide(std::uint32_t seed, const void* data, std::size_t size) noexcept;
bool crc32c_has_wide() noexcept;

}  // namespace maniple

// Compile-time CRC-32C arithmetic. A 32-bit value is a polynomial over GF(2) with its bits reversed: the highest bit is
// the coefficient of x^0, the lowest the coefficient of x^31. Used for constants only; the program contains none of
// this code.
namespace MANIPLE_API maniple {
namespace crc32c_polynomial {

inline constexpr std::uint32_t kPolynomial = 0x82f63b78u;
inline constexpr std::uint32_t kOne = 0x80000000u;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1u) != 0 ? kPolynomial : 0u); }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

constexpr std::uint32_t power_of_x(std::size_t exponent) {
  std::uint32_t power = times_x(kOne);
  std::uint32_t result = kOne;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = multiply(result, power);
    power = multiply(power, power);
  }
  return result;
}

/// The factor that appends `bytes` zero bytes: multiply a CRC register by it.
constexpr std::uint32_t zero_bytes(std::size_t bytes) { return power_of_x(8 * bytes); }

/// table[b] = factor * (the polynomial with byte b at bits 8 * place and up), for every b.
constexpr std::array<std::uint32_t, 256> byte_table(std::uint32_t factor, int place) {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t bit = 1; bit < 256; bit <<= 1) {
    const std::uint32_t value = multiply(bit << (8 * place), factor);
    for (std::uint32_t below = 0; below < bit; ++below) table[bit | below] = value ^ table[below];
  }
  return table;
}

}  // namespace crc32c_polynomial
}  // namespace maniple
