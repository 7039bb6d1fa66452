#include "session/detector_wire.h"

#include <gtest/gtest.h>

#include "base/codec.h"

namespace maniple {
namespace {

using Kind = DetectorMessage::Kind;
constexpr std::size_t kLengthBytes = 4;

DetectorMessage sample(Kind kind = Kind::abort) {
  DetectorMessage message{.kind = kind, .error = {}, .rank = 1023, .seq = 0xfedcba9876543210ULL, .group = "world/2.1"};
  if (kind != Kind::abort) message.text = "why";
  if (kind == Kind::abort) message.error = {.kind = ErrorKind::mismatch, .ranks = {1, 5}, .reason = "why"};
  return message;
}

std::string body_of(const DetectorMessage& message) { return encode(message).substr(kLengthBytes); }

void expect_same(const DetectorMessage& a, const DetectorMessage& b) {
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.error.kind, b.error.kind);
  EXPECT_EQ(a.error.ranks, b.error.ranks);
  EXPECT_EQ(a.error.reason, b.error.reason);
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.seq, b.seq);
  EXPECT_EQ(a.group, b.group);
  EXPECT_EQ(a.text, b.text);
}

TEST(ControlWire, EveryKindDecodesToItself) {
  for (const Kind kind : {Kind::heartbeat, Kind::leaving, Kind::lost, Kind::abort, Kind::query_call, Kind::call_reply,
                          Kind::left, Kind::gone, Kind::waiting, Kind::query_progress, Kind::progress_reply}) {
    expect_same(decode_control_message(body_of(sample(kind))), sample(kind));
  }
  expect_same(decode_control_message(body_of({})), {});
  DetectorMessage nobody = sample();
  nobody.rank = -1;
  EXPECT_EQ(decode_control_message(body_of(nobody)).rank, -1);
}

TEST(ControlWire, TheLengthInFrontIsThatOfTheBody) {
  const std::string frame = encode(sample());
  EXPECT_EQ(ByteReader(frame).get<std::uint32_t>(), frame.size() - kLengthBytes);
}

TEST(ControlWire, LongTextsAreCutSoThatAMessageIsNeverTooLong) {
  DetectorMessage message = sample(Kind::lost);
  message.group.assign(10'000, 'g');
  message.text.assign(1'000'000, 't');
  const std::string body = body_of(message);
  EXPECT_LE(body.size(), kMostControlBytes);
  const DetectorMessage cut = decode_control_message(body);
  EXPECT_EQ(cut.group, message.group.substr(0, cut.group.size()));
  EXPECT_EQ(cut.text, message.text.substr(0, cut.text.size()));
  EXPECT_GE(cut.group.size(), 1000u);
  EXPECT_GE(cut.text.size(), 40'000u);
  message = sample(Kind::abort);
  message.error.reason.assign(1'000'000, 't');
  EXPECT_LE(body_of(message).size(), kMostControlBytes);
  EXPECT_GE(decode_control_message(body_of(message)).error.reason.size(), 40'000u);
}

TEST(ControlWire, UnknownKindsAndErrorsAreRefused) {
  for (const char kind : {'\0', '\14', '\xff'}) {
    std::string body = body_of(sample());
    body[0] = kind;
    EXPECT_THROW(decode_control_message(body), ProtocolError) << int{kind};
  }
  const std::size_t error_kind = 1 + 4 + 8 + 4 + sample().group.size() + 4;
  for (const char error : {'\10', '\xff'}) {
    std::string body = body_of(sample());
    body[error_kind] = error;
    EXPECT_THROW(decode_control_message(body), ProtocolError) << int{error};
  }
}

TEST(ControlWire, TooShortAndTooLongAreRefused) {
  const std::string body = body_of(sample());
  for (std::size_t size = 0; size < body.size(); ++size) {
    EXPECT_THROW(decode_control_message(body.substr(0, size)), ProtocolError) << size;
  }
  EXPECT_THROW(decode_control_message(body + '\0'), ProtocolError);
}

TEST(ControlWire, AStringThatClaimsTooMuchIsRefused) {
  constexpr std::size_t kGroupLength = 1 + 4 + 8;
  std::string body = body_of(sample());
  for (std::size_t i = 0; i < 4; ++i) body[kGroupLength + i] = '\xff';
  EXPECT_THROW(decode_control_message(body), ProtocolError);
}

}  // namespace
}  // namespace maniple
