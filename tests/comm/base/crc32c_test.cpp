#include "comm/base/crc32c.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace maniple {
namespace {

/// Bit by bit, straight from the definition.
std::uint32_t by_definition(std::uint32_t seed, const unsigned char* data, std::size_t size) {
  std::uint32_t crc = ~seed;
  for (std::size_t i = 0; i < size; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

std::vector<unsigned char> random_bytes(std::size_t size) {
  std::mt19937 random(7);
  std::vector<unsigned char> bytes(size);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

TEST(Crc32c, KnownValues) {
  EXPECT_EQ(crc32c(0, "123456789", 9), 0xe3069283u);
  EXPECT_EQ(crc32c(0, nullptr, 0), 0u);
  EXPECT_EQ(crc32c(0, std::string(32, '\0').data(), 32), 0x8a9136aau);    // RFC 3720, B.4
  EXPECT_EQ(crc32c(0, std::string(32, '\xff').data(), 32), 0x62a8ab43u);  // RFC 3720, B.4
}

TEST(Crc32c, AllImplementationsAgreeAtEverySizeAndAlignment) {
  const auto bytes = random_bytes(2500);
  std::vector<std::size_t> sizes;
  for (std::size_t size = 0; size <= 70; ++size) sizes.push_back(size);
  for (const std::size_t around : {256, 512, 768, 1024, 1280, 1536, 2304}) {
    for (std::size_t size = around - 9; size <= around + 9; ++size) sizes.push_back(size);
  }
  for (const std::size_t size : sizes) {
    for (const std::size_t offset : {0, 1, 3, 7}) {
      const std::uint32_t expected = by_definition(0x1234567, bytes.data() + offset, size);
      EXPECT_EQ(crc32c(0x1234567, bytes.data() + offset, size), expected) << size;
      EXPECT_EQ(crc32c_tables(0x1234567, bytes.data() + offset, size), expected) << size;
      if (crc32c_has_hardware()) {
        EXPECT_EQ(crc32c_hardware(0x1234567, bytes.data() + offset, size), expected) << size;
      }
      if (crc32c_has_wide()) {
        EXPECT_EQ(crc32c_wide(0x1234567, bytes.data() + offset, size), expected) << size;
      }
    }
  }
}

TEST(Crc32c, AllImplementationsAgreeOnLongInputs) {
  const auto bytes = random_bytes(std::size_t{1} << 20);
  std::vector<std::size_t> sizes{65536, 100003, 262144, bytes.size() - 7};
  for (std::size_t size = 16370; size <= 16900; ++size) sizes.push_back(size);
  for (const std::size_t size : sizes) {
    const std::size_t offset = size % 8;
    const std::uint32_t expected = crc32c_tables(0x1234567, bytes.data() + offset, size - offset);
    EXPECT_EQ(crc32c(0x1234567, bytes.data() + offset, size - offset), expected) << size;
    if (crc32c_has_wide()) {
      EXPECT_EQ(crc32c_wide(0x1234567, bytes.data() + offset, size - offset), expected) << size;
    }
  }
}

TEST(Crc32c, ChecksumsOfPiecesCombine) {
  const auto bytes = random_bytes(5000);
  const std::uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  for (std::size_t cut = 0; cut <= bytes.size(); cut += 37) {
    EXPECT_EQ(crc32c(crc32c(0, bytes.data(), cut), bytes.data() + cut, bytes.size() - cut), whole);
  }
}

TEST(Crc32c, DetectsEveryFlippedBit) {
  auto bytes = random_bytes(900);
  const std::uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    ASSERT_NE(crc32c(0, bytes.data(), bytes.size()), whole) << "bit " << bit;
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
  }
}

}  // namespace
}  // namespace maniple
