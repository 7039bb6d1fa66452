#include "comm/transport/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/frame_receiver.h"
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

FrameHeader notice() {
  FrameHeader header;
  header.kind = FrameKind::notice;
  header.number = 9;
  return header;
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
  for (const FrameHeader& header : {sample(), message(), notice()}) {
    for (std::size_t bit = 0; bit < header_bytes(header.kind) * 8; ++bit) {
      auto bytes = encoded(header);
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      bytes.resize(kMaxHeaderBytes);  // a message whose kind has changed seems to be longer
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

TEST(FrameHeader, OfANoticeHasNothingButItsNumber) {
  EXPECT_EQ(header_bytes(FrameKind::notice), 32U);
  EXPECT_EQ(decoded(encoded(notice())), notice());
  const auto refused = [](auto change) {
    FrameHeader header = notice();
    change(header);
    EXPECT_THROW(decoded(encoded(header)), ProtocolError);
  };
  refused([](FrameHeader& header) { header.length = 4; });
  refused([](FrameHeader& header) { header.check = 1; });
  refused([](FrameHeader& header) { header.checked = true; });
  refused([](FrameHeader& header) { header.streams = 2; });
}

/// Bytes as they come from a socket that gives all of them at once, then nothing.
class Bytes final : public ByteSource {
 public:
  explicit Bytes(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
  std::size_t read_some(std::span<const iovec> parts) override {
    std::size_t moved = 0;
    for (const iovec& part : parts) {
      const std::size_t size = std::min(part.iov_len, bytes_.size() - at_);
      std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(at_), size, static_cast<std::byte*>(part.iov_base));
      at_ += size;
      moved += size;
    }
    return moved;
  }
  int fd() const noexcept override { return 0; }  // a number, so that it counts as a socket; nothing polls it

 private:
  std::vector<std::byte> bytes_;
  std::size_t at_ = 0;
};

std::vector<std::byte> joined(std::vector<std::byte> first, const std::vector<std::byte>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

FrameHeader empty_frame(const Signature& signature, std::uint32_t number) {
  FrameHeader header;
  header.signature = signature;
  header.number = number;
  return header;
}

FrameHeader notice_before(std::uint32_t number) {
  FrameHeader header = notice();
  header.number = number;
  return header;
}

// Receives two empty frames, of which `first` holds what comes on the sender's connection and `own` on this rank's.
std::string receive_two(std::vector<std::byte> first, std::vector<std::byte> own, bool has_own = true) {
  const Signature signature{1, 2, 3, 4};
  FrameReceiver receiver({3, 3}, [&](int stream) -> std::unique_ptr<ByteSource> {
    if (stream == FrameReceiver::kOwnConnection) return has_own ? std::make_unique<Bytes>(own) : nullptr;
    return std::make_unique<Bytes>(first);
  });
  Transfer transfers[2];
  for (Transfer& transfer : transfers) {
    transfer.signature = &signature;
    receiver.post(transfer);
  }
  try {
    while (receiver.advance()) continue;
  } catch (const ProtocolError& error) {
    return error.what();
  }
  return transfers[0].done && transfers[1].done ? "both" : transfers[0].done ? "the first" : "none";
}

TEST(Notice, FramesContinueOnTheReceiversOwnConnection) {
  const Signature signature{1, 2, 3, 4};
  const auto zero = encoded(empty_frame(signature, 0));
  const auto one = encoded(empty_frame(signature, 1));
  const auto before_one = encoded(notice_before(1));
  EXPECT_EQ(receive_two(joined(zero, one), {}), "both");
  EXPECT_EQ(receive_two(joined(zero, before_one), one), "both");
  EXPECT_EQ(receive_two(encoded(notice_before(0)), joined(zero, one)), "both");
  EXPECT_EQ(receive_two(joined(zero, before_one), {}), "the first");
}

TEST(Notice, InvalidNoticesAreRefused) {
  const Signature signature{1, 2, 3, 4};
  const auto zero = encoded(empty_frame(signature, 0));
  const auto one = encoded(empty_frame(signature, 1));
  const auto before_one = encoded(notice_before(1));
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(contains(receive_two(joined(zero, before_one), one, false), "that this rank has not opened"));
  EXPECT_TRUE(contains(receive_two(joined(zero, before_one), before_one), "that this rank has not opened"));  // twice
  EXPECT_TRUE(contains(receive_two(joined(zero, joined(before_one, one)), {}), "bytes behind the notice"));
  EXPECT_TRUE(contains(receive_two(joined(zero, encoded(notice_before(2))), one), "frame 2 where 1 was expected"));
}

TEST(Notice, OnAConnectionForMessagesIsRefused) {
  FrameReceiver receiver({3, 3}, std::make_unique<Bytes>(encoded(notice_before(0))));
  EXPECT_THROW(receiver.peek(), ProtocolError);
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
