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

TEST(FrameHeader, comes_back_as_it_was) {
  EXPECT_EQ(decode_frame_header(encoded(sample())), sample());
  EXPECT_EQ(decode_frame_header(encoded(FrameHeader{})), FrameHeader{});
}

TEST(FrameHeader, every_flipped_bit_is_noticed) {
  for (std::size_t bit = 0; bit < kFrameHeaderBytes * 8; ++bit) {
    auto bytes = encoded(sample());
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_THROW(decode_frame_header(bytes), ProtocolError) << "bit " << bit;
  }
}

TEST(FrameHeader, names_the_version_of_another_release) {
  auto bytes = encoded(sample());
  bytes[4] = std::byte{9};
  try {
    decode_frame_header(bytes);
    FAIL() << "no error";
  } catch (const ProtocolError& error) {
    EXPECT_NE(std::string(error.what()).find("format 9"), std::string::npos) << error.what();
  }
}

TEST(FrameHeader, impossible_fields_are_refused_although_the_check_is_right) {
  FrameHeader header = sample();
  header.streams = 0;
  EXPECT_THROW(decode_frame_header(encoded(header)), ProtocolError);
  header.streams = 17;
  EXPECT_THROW(decode_frame_header(encoded(header)), ProtocolError);
  header = sample();
  header.length = 0;
  EXPECT_THROW(decode_frame_header(encoded(header)), ProtocolError) << "nothing cannot come in pieces";
}

TEST(PieceHeader, comes_back_as_it_was_and_has_a_magic) {
  const PieceHeader header{.number = 5, .index = 0xfffffffe, .check = 0x12345678};
  std::array<std::byte, kPieceHeaderBytes> bytes{};
  encode(header, bytes);
  EXPECT_EQ(decode_piece_header(bytes), header);
  bytes[1] ^= std::byte{4};
  EXPECT_THROW(decode_piece_header(bytes), ProtocolError);
}

TEST(SegmentCount, counts_pieces) {
  EXPECT_EQ(segment_count(0, false), 1U);
  EXPECT_EQ(segment_count(10 * kPieceBytes, false), 1U);
  EXPECT_EQ(segment_count(1, true), 1U);
  EXPECT_EQ(segment_count(kPieceBytes, true), 1U);
  EXPECT_EQ(segment_count(kPieceBytes + 1, true), 2U);
}

}  // namespace
}  // namespace maniple
