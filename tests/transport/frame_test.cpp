#include "transport/frame.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

FrameHeader sample() {
  return {.signature = {1, 2, 3, 0xfedcba9876543210ULL},
          .length = 1'000'000'000'007ULL,
          .number = 0xffffffff,
          .check = 77,
          .streams = 16,
          .checked = true,
          .pieced = true};
}

FrameHeader message() {
  return {.kind = FrameKind::message,
          .signature = {},
          .dtype = DType::float64,
          .tag = -7,
          .length = 80,
          .number = 5,
          .check = 77,
          .checked = true};
}

std::vector<std::byte> encoded(const FrameHeader& header) {
  std::vector<std::byte> bytes(header_bytes(header.kind));
  encode(header, bytes.data());
  return bytes;
}
FrameHeader decoded(const std::vector<std::byte>& bytes) { return decode_frame_header(bytes.data()); }

TEST(FrameHeader, ComesBackAsItWas) {
  EXPECT_EQ(decoded(encoded(sample())), sample());
  EXPECT_EQ(decoded(encoded(FrameHeader{})), FrameHeader{});
}

TEST(FrameHeader, EveryFlippedBitIsNoticed) {
  for (const FrameHeader& header : {sample(), message()}) {
    for (std::size_t bit = 0; bit < header_bytes(header.kind) * 8; ++bit) {
      auto bytes = encoded(header);
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      bytes.resize(kMostHeaderBytes);  // a message whose kind has changed seems to be longer
      EXPECT_THROW(decoded(bytes), ProtocolError) << "bit " << bit;
    }
  }
}

TEST(FrameHeader, OfAMessageIsHalfACacheLine) {
  EXPECT_EQ(header_bytes(FrameKind::message), 32U);
  EXPECT_EQ(header_bytes(FrameKind::collective), 64U);
  EXPECT_EQ(header_bytes(encoded(message()).data()), 32U);
  EXPECT_EQ(header_bytes(encoded(sample()).data()), 64U);
}

TEST(FrameHeader, NamesTheVersionOfAnotherRelease) {
  auto bytes = encoded(sample());
  bytes[3] = std::byte{9};
  try {
    decoded(bytes);
    FAIL() << "no error";
  } catch (const ProtocolError& error) {
    EXPECT_NE(std::string(error.what()).find("format 9, expected"), std::string::npos) << error.what();
  }
}

TEST(FrameHeader, ImpossibleFieldsAreRefusedAlthoughTheCheckIsRight) {
  FrameHeader header = sample();
  header.streams = 0;
  EXPECT_THROW(decoded(encoded(header)), ProtocolError);
  header.streams = 17;
  EXPECT_THROW(decoded(encoded(header)), ProtocolError);
  header = sample();
  header.length = 0;
  EXPECT_THROW(decoded(encoded(header)), ProtocolError) << "nothing cannot be sent in pieces";
}

TEST(FrameHeader, OfAMessageComesBackAsItWas) {
  EXPECT_EQ(decoded(encoded(message())), message());
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    FrameHeader header = message();
    header.dtype = static_cast<DType>(dtype);
    EXPECT_EQ(decoded(encoded(header)), header);
  }
}

TEST(FrameHeader, OfAMessageWithImpossibleFieldsIsRefused) {
  const auto refused = [](auto change) {
    FrameHeader header = message();
    change(header);
    EXPECT_THROW(decoded(encoded(header)), ProtocolError);
  };
  refused([](FrameHeader& header) { header.dtype = static_cast<DType>(kDTypeCount); });
  refused([](FrameHeader& header) { header.length += 1; });
  refused([](FrameHeader& header) { header.streams = 2; });
}

TEST(PieceHeader, ComesBackAsItWasAndHasAMagic) {
  const PieceHeader header{.number = 5, .index = 0xfffffffe, .check = 0x12345678};
  std::array<std::byte, kPieceHeaderBytes> bytes{};
  encode(header, bytes);
  EXPECT_EQ(decode_piece_header(bytes), header);
  bytes[1] ^= std::byte{4};
  EXPECT_THROW(decode_piece_header(bytes), ProtocolError);
}

TEST(SegmentCount, CountsPieces) {
  EXPECT_EQ(segment_count(0, false), 1U);
  EXPECT_EQ(segment_count(10 * kPieceBytes, false), 1U);
  EXPECT_EQ(segment_count(1, true), 1U);
  EXPECT_EQ(segment_count(kPieceBytes, true), 1U);
  EXPECT_EQ(segment_count(kPieceBytes + 1, true), 2U);
}

}  // namespace
}  // namespace maniple
