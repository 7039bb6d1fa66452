#include "transport/message_wire.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/crc32c.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

MessageHeader sample() { return {.dtype = DType::float64, .checked = true, .tag = -7, .length = 1'000'000'000'007ULL}; }

TEST(MessageHeader, ComesBackAsItWas) {
  EXPECT_EQ(decode_message_header(encode(sample())), sample());
  EXPECT_EQ(decode_message_header(encode(MessageHeader{})), MessageHeader{});
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    const MessageHeader header{.dtype = static_cast<DType>(dtype)};
    EXPECT_EQ(decode_message_header(encode(header)), header);
  }
}

TEST(MessageHeader, EveryFlippedBitIsNoticed) {
  for (std::size_t bit = 0; bit < kMessageHeaderBytes * 8; ++bit) {
    MessageHeaderBytes bytes = encode(sample());
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_THROW(decode_message_header(bytes), ProtocolError) << "bit " << bit;
  }
}

TEST(MessageHeader, ImpossibleFieldsAreRefusedThoughTheChecksumIsRight) {
  const std::pair<std::size_t, std::uint8_t> changes[] = {{4, kDTypeCount}, {4, 0xff}, {5, 2},  {6, 1}, {7, 1},
                                                          {12, 1},          {15, 1},   {24, 1}, {27, 1}};
  for (const auto& [at, value] : changes) {
    MessageHeaderBytes bytes = encode(sample());
    bytes[at] = std::byte{value};
    const std::uint32_t check = crc32c(0, bytes.data(), kMessageHeaderBytes - 4);
    for (std::size_t i = 0; i < 4; ++i) bytes[kMessageHeaderBytes - 4 + i] = static_cast<std::byte>(check >> (8 * i));
    EXPECT_THROW(decode_message_header(bytes), ProtocolError) << "byte " << at << " = " << int{value};
  }
}

}  // namespace
}  // namespace maniple
