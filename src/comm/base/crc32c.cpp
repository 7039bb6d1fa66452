#include "comm/base/crc32c.h"

#include <cstring>

namespace maniple {
namespace {

/// kTables[k][b]: byte b followed by k zero bytes. Eight lookups process eight bytes at once.
constexpr auto make_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::size_t k = 0; k < tables.size(); ++k) {
    tables[k] = crc32c_polynomial::byte_table(crc32c_polynomial::zero_bytes(k + 1), 0);
  }
  return tables;
}
constexpr auto kTables = make_tables();

std::uint64_t load_little_endian(const unsigned char* from) noexcept {
  std::uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word |= std::uint64_t{from[i]} << (8 * i);
  return word;
}

}  // namespace

std::uint32_t crc32c_tables(std::uint32_t seed, const void* data, std::size_t size) noexcept {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~seed;
  for (; size >= 8; at += 8, size -= 8) {
    const std::uint64_t word = load_little_endian(at) ^ crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(word >> (8 * i)) & 0xff];
  }
  for (; size != 0; ++at, --size) crc = kTables[0][(crc ^ *at) & 0xff] ^ (crc >> 8);
  return ~crc;
}

std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t size) noexcept {
  static const auto fastest = crc32c_has_wide()       ? &crc32c_wide
                              : crc32c_has_hardware() ? &crc32c_hardware
                                                      : &crc32c_tables;
  return fastest(seed, data, size);
}

}  // namespace maniple
