#include "transport/frame.h"

#include <gtest/gtest.h>

#include <array>

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

std::array<std::byte, kFrameHeaderBytes> encoded(const FrameHeader& header) {
  std::array<std::byte, kFrameHeaderBytes> bytes{};
  encode(header, bytes);
  return bytes;
}

TEST(FrameHeader, ComesBackAsItWas) {
  EXPECT_EQ(decode_frame_header(encoded(sample())), sample());
  EXPECT_EQ(decode_frame_header(encoded(FrameHeader{})), FrameHeader{});
}

TEST(FrameHeader, EveryFlippedBitIsNoticed) {
  for (std::size_t bit = 0; bit < kFrameHeaderBytes * 8; ++bit) {
    auto bytes = encoded(sample());
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_THROW(decode_frame_header(bytes), ProtocolError) << "bit " << bit;
  }
}

TEST(FrameHeader, NamesTheVersionOfAnotherRelease) {
  auto bytes = encoded(sample());
  bytes[4] = std::byte{9};
  try {
    decode_frame_header(bytes);
    FAIL() << "no error";
  } catch (const ProtocolError& error) {
    EXPECT_NE(std::string(error.what()).find("format 9, expected"), std::string::npos) << error.what();
  }
}

TEST(FrameHeader, ImpossibleFieldsAreRefusedAlthoughTheCheckIsRight) {
  FrameHeader header = sample();
  header.streams = 0;
  EXPECT_THROW(decode_frame_header(encoded(header)), ProtocolError);
  header.streams = 17;
  EXPECT_THROW(decode_frame_header(encoded(header)), ProtocolError);
  header = sample();
  header.length = 0;
  EXPECT_THROW(decode_frame_header(encoded(header)), ProtocolError) << "nothing cannot be sent in pieces";
}

FrameHeader message() {
  return {.kind = FrameKind::message,
          .signature = Signature::of_message(DType::float64, -7, 80),
          .length = 80,
          .checked = true};
}

TEST(FrameHeader, OfAMessageComesBackAsItWas) {
  EXPECT_EQ(decode_frame_header(encoded(message())), message());
  EXPECT_EQ(message().signature.tag(), -7);
  EXPECT_EQ(message().signature.dtype(), DType::float64);
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    FrameHeader header = message();
    header.signature = Signature::of_message(static_cast<DType>(dtype), 1, 80);
    EXPECT_EQ(decode_frame_header(encoded(header)), header);
  }
}

TEST(FrameHeader, OfAMessageWithImpossibleFieldsIsRefused) {
  const auto refused = [](auto change) {
    FrameHeader header = message();
    change(header);
    EXPECT_THROW(decode_frame_header(encoded(header)), ProtocolError) << header.signature.describe();
  };
  refused([](FrameHeader& header) { header.signature.seq = 1; });
  refused([](FrameHeader& header) { header.signature.what += std::uint64_t{kDTypeCount} << 8; });
  refused([](FrameHeader& header) { header.signature.what |= std::uint64_t{1} << 16; });
  refused([](FrameHeader& header) { header.signature.what += 1; });
  refused([](FrameHeader& header) { header.signature.count += 1; });
  refused([](FrameHeader& header) { header.signature.detail |= std::uint64_t{1} << 32; });
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
