#include "comm/session/detector_message.h"

#include <gtest/gtest.h>

#include "comm/base/codec.h"

namespace maniple::detector {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr std::uint64_t kSeq = 0xfedcba9876543210ULL;

std::string body_of(const Message& message) { return encode(message).substr(kLengthBytes); }

template <class T>
T again(const T& message) {
  return std::get<T>(decode(body_of(message)));
}

/// One of each kind, in the order of their numbers.
std::vector<Message> samples() {
  const ErrorInfo error = {.kind = ErrorKind::mismatch, .ranks = {1, 5}, .reason = "why"};
  return {
      Heartbeat{},
      Leaving{},
      Lost{.rank = 1023, .text = "why"},
      Abort{.rank = 1023, .seq = kSeq, .group = "world/2.1", .error = error},
      QueryCall{.seq = kSeq, .group = "world/2.1"},
      CallReply{.rank = 1023, .seq = kSeq, .group = "world/2.1", .call = "barrier #1", .place = "train.cpp:40"},
      Left{.rank = 1023},
      Gone{.rank = 1023},
      Waiting{.rank = 1, .seq = kSeq, .group = "world", .call = "barrier #1", .waited_ms = kSeq, .members = {0, 1023}},
      QueryProgress{.group = "world/2.1"},
      ProgressReply{.rank = 1023, .seq = kSeq, .group = "world/2.1", .text = "why"},
      Departed{.rank = 1023, .seq = kSeq, .group = "world/2.1"},
      Compare{.rank = 1023, .seq = kSeq, .group = "world/2.1", .arguments = false, .members = {3, 0, 1023}},
      CallPending{.rank = 1023, .seq = kSeq, .group = "world/2.1"},
      QueryAlive{},
      Alive{},
      Shrink{.rank = 1023, .seq = kSeq, .group = "world/2.1", .made = true, .members = {3, 0, 1023}},
      Survivors{.seq = kSeq, .group = "world/2.1", .confirmed = true, .members = {3, 1023}},
      CancelShrink{.rank = 1023, .group = "world/2.1"},
      Missing{.group = "world/2.1", .members = {3, 1023}}};
}

TEST(DetectorMessage, EveryKindDecodesToItself) {
  ASSERT_EQ(samples().size(), std::variant_size_v<Message>);
  for (std::size_t i = 0; i < samples().size(); ++i) {
    const Message message = samples()[i];
    EXPECT_EQ(message.index(), i) << "each kind has its number";
    EXPECT_EQ(body_of(message).front(), static_cast<char>(i + 1));
    EXPECT_EQ(decode(body_of(message)).index(), i);
    EXPECT_EQ(encode(decode(body_of(message))), encode(message)) << i;
  }
}

TEST(DetectorMessage, FieldsArriveInTheirPlaces) {
  const Abort abort = again(std::get<Abort>(samples()[3]));
  EXPECT_EQ(abort.rank, 1023);
  EXPECT_EQ(abort.seq, kSeq);
  EXPECT_EQ(abort.group, "world/2.1");
  EXPECT_EQ(abort.error.kind, ErrorKind::mismatch);
  EXPECT_EQ(abort.error.ranks, (std::vector<int>{1, 5}));
  EXPECT_EQ(abort.error.reason, "why");
  const CallReply reply = again(std::get<CallReply>(samples()[5]));
  EXPECT_EQ(reply.call, "barrier #1");
  EXPECT_EQ(reply.place, "train.cpp:40");
  const Waiting waiting = again(std::get<Waiting>(samples()[8]));
  EXPECT_EQ(waiting.waited_ms, kSeq);
  EXPECT_EQ(waiting.members, (std::vector<std::int32_t>{0, 1023}));
  const Compare compare = again(std::get<Compare>(samples()[12]));
  EXPECT_FALSE(compare.arguments);
  EXPECT_EQ(compare.members, (std::vector<std::int32_t>{3, 0, 1023}));
  const Shrink shrink = again(std::get<Shrink>(samples()[16]));
  EXPECT_TRUE(shrink.made);
  EXPECT_EQ(shrink.members, (std::vector<std::int32_t>{3, 0, 1023}));
  const Survivors survivors = again(std::get<Survivors>(samples()[17]));
  EXPECT_EQ(survivors.seq, kSeq);
  EXPECT_TRUE(survivors.confirmed);
  EXPECT_EQ(survivors.members, (std::vector<std::int32_t>{3, 1023}));
  EXPECT_EQ(again(std::get<Missing>(samples()[19])).members, (std::vector<std::int32_t>{3, 1023}));
  EXPECT_EQ(again(Abort{.rank = -1}).rank, -1);
  EXPECT_EQ(again(Lost{.rank = 3, .text = "why"}).text, "why");
}

TEST(DetectorMessage, TheLengthInFrontIsThatOfTheBody) {
  for (const Message& message : samples()) {
    const std::string frame = encode(message);
    EXPECT_EQ(ByteReader(frame).get<std::uint32_t>(), frame.size() - kLengthBytes);
  }
}

TEST(DetectorMessage, LongTextsAreTruncatedSoThatAMessageIsNeverTooLong) {
  const std::string group(10'000, 'g');
  const std::string text(1'000'000, 't');
  const std::vector<Message> messages = {
      Lost{.rank = 1, .text = text}, Abort{.rank = 1, .group = group, .error = {.reason = text}},
      CallReply{.rank = 1, .group = group, .call = text, .place = text},
      Waiting{.rank = 1, .group = group, .call = text, .members = std::vector<std::int32_t>(100'000, 7)},
      ProgressReply{.rank = 1, .group = group, .text = text}};
  for (const Message& message : messages) {
    const std::string body = body_of(message);
    EXPECT_LE(body.size(), kMaxFrameBytes);
    EXPECT_GE(body.size(), 30'000u);
    EXPECT_EQ(body_of(decode(body)), body);
  }
  const CallReply cut = again(std::get<CallReply>(messages[2]));
  EXPECT_EQ(cut.group, group.substr(0, 1024));
  EXPECT_EQ(cut.call, text.substr(0, 48 * 1024));
  EXPECT_EQ(cut.place, text.substr(0, 1024));
  EXPECT_GE(again(std::get<Abort>(messages[1])).error.reason.size(), 40'000u);
}

TEST(DetectorMessage, UnknownKindsAndErrorsAreRefused) {
  for (const char kind : {'\0', '\25', '\xff'}) {
    std::string body = body_of(Heartbeat{});
    body[0] = kind;
    EXPECT_THROW(decode(body), ProtocolError) << int{kind};
  }
  const Abort abort = std::get<Abort>(samples()[3]);
  const std::size_t error_kind = 1 + 4 + 8 + 4 + abort.group.size() + 4;
  for (const char error : {'\10', '\xff'}) {
    std::string body = body_of(abort);
    body[error_kind] = error;
    EXPECT_THROW(decode(body), ProtocolError) << int{error};
  }
}

TEST(DetectorMessage, TooShortAndTooLongAreRefused) {
  for (const Message& message : samples()) {
    const std::string body = body_of(message);
    for (std::size_t size = 0; size < body.size(); ++size) {
      EXPECT_THROW(decode(body.substr(0, size)), ProtocolError) << message.index() << ": " << size;
    }
    EXPECT_THROW(decode(body + '\0'), ProtocolError) << message.index();
  }
}

TEST(DetectorMessage, AStringOrListThatClaimsTooMuchIsRefused) {
  constexpr std::size_t kGroupLength = 1 + 4 + 8;
  std::string body = body_of(Departed{.rank = 1, .seq = 2, .group = "world"});
  for (std::size_t i = 0; i < 4; ++i) body[kGroupLength + i] = '\xff';
  EXPECT_THROW(decode(body), ProtocolError);
  body = body_of(Compare{.rank = 1, .seq = 2, .group = "world"});
  body[body.size() - 5] = 2;  // the flag
  EXPECT_THROW(decode(body), ProtocolError);
  body = body_of(Waiting{.rank = 1, .seq = 2, .group = "g", .call = "c", .waited_ms = 3});
  for (std::size_t i = body.size() - 4; i < body.size(); ++i) body[i] = '\xff';
  EXPECT_THROW(decode(body), ProtocolError);
}

}  // namespace
}  // namespace maniple::detector
