#include "comm/session/detector_wire.h"

#include <sys/socket.h>

#include <future>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "comm/base/codec.h"

namespace maniple {
namespace {

using Kind = DetectorMessage::Kind;
constexpr std::size_t kLengthBytes = 4;

DetectorMessage sample(Kind kind = Kind::abort) {
  DetectorMessage message{.kind = kind, .error = {}, .rank = 1023, .seq = 0xfedcba9876543210ULL, .group = "world/2.1"};
  if (kind != Kind::abort) message.text = "why";
  if (kind == Kind::call_reply) message.place = "train.cpp:40";
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
  EXPECT_EQ(a.place, b.place);
}

TEST(ControlWire, EveryKindDecodesToItself) {
  for (const Kind kind : {Kind::heartbeat, Kind::leaving, Kind::lost, Kind::abort, Kind::query_call, Kind::call_reply,
                          Kind::left, Kind::gone, Kind::waiting, Kind::query_progress, Kind::progress_reply,
                          Kind::departed, Kind::compare, Kind::call_pending, Kind::query_alive, Kind::alive}) {
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
  for (const char kind : {'\0', '\21', '\xff'}) {
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

TEST(ControlWire, WhereARankCalledTravelsWithItsReplyAloneAndIsCut) {
  DetectorMessage message = sample(Kind::call_reply);
  message.place.assign(10'000, 'p');
  message.text.assign(1'000'000, 't');
  const std::string body = body_of(message);
  EXPECT_LE(body.size(), kMostControlBytes);
  EXPECT_EQ(decode_control_message(body).place, message.place.substr(0, 1024));
  message.kind = Kind::lost;
  EXPECT_EQ(decode_control_message(body_of(message)).place, "");
}

TEST(ControlWire, AStringThatClaimsTooMuchIsRefused) {
  constexpr std::size_t kGroupLength = 1 + 4 + 8;
  std::string body = body_of(sample());
  for (std::size_t i = 0; i < 4; ++i) body[kGroupLength + i] = '\xff';
  EXPECT_THROW(decode_control_message(body), ProtocolError);
}

using Kind = DetectorMessage::Kind;

const ConnectionKeys kHere = derive_keys(preferred_cipher(), TrafficSecret{}, "test", true);
const ConnectionKeys kThere = derive_keys(preferred_cipher(), TrafficSecret{}, "test", false);

// A link whose other end is a socket and its keys.
struct Pair {
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("test");
  UniqueFd other;
  std::shared_ptr<DetectorLink> link;
  std::promise<std::string> closed;
  RecordSealer sealer{kThere.cipher, kThere.send};
  RecordOpener opener{kThere.cipher, kThere.receive};
  std::string unread;

  explicit Pair(std::function<void(const DetectorMessage&)> on_message = [](const DetectorMessage&) {}) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    other = UniqueFd(fds[1]);
    link = std::make_shared<DetectorLink>(loop, SecureConnection(UniqueFd(fds[0]), kHere));
    in_loop([&] {
      link->open(
          {.message = std::move(on_message), .closed = [this](const std::string& why) { closed.set_value(why); }});
    });
  }
  ~Pair() {
    in_loop([&] { link.reset(); });
  }
  void in_loop(const std::function<void()>& task) { loop->post_and_wait(task); }

  void send_raw(std::string_view bytes) const {
    ASSERT_EQ(::send(other.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  }
  std::string sealed(std::string_view bytes) {
    std::string records;
    sealer.seal(bytes, records);
    return records;
  }
  std::string read(std::size_t bytes) {
    while (unread.size() < bytes) {
      char buffer[8192];
      const ssize_t got = ::recv(other.get(), buffer, sizeof buffer, 0);
      if (got <= 0) throw std::runtime_error("the link has ended");
      std::span<char> part(buffer, static_cast<std::size_t>(got));
      while (const auto plain = opener.next(part)) unread += *plain;
    }
    const std::string all = unread.substr(0, bytes);
    unread.erase(0, bytes);
    return all;
  }
  DetectorMessage read_frame() {
    const std::string length = read(4);
    return decode_control_message(read(ByteReader(length).get<std::uint32_t>()));
  }
};

DetectorMessage abort_number(int number) {
  DetectorMessage message;
  message.kind = Kind::abort;
  message.rank = number;
  message.error.reason.assign(40'000, 'x');
  return message;
}

TEST(DetectorLink, ABacklogArrivesInWholeFrames) {
  Pair pair;
  constexpr int kFrames = 100;  // 4 MB, far more than a socket holds
  pair.in_loop([&] {
    for (int i = 0; i < kFrames; ++i) pair.link->send(abort_number(i));
  });
  for (int i = 0; i < kFrames; ++i) {
    const DetectorMessage message = pair.read_frame();
    EXPECT_EQ(message.rank, i);
    EXPECT_EQ(message.error.reason.size(), 40'000u);
  }
}

TEST(DetectorLink, WhatIsSaidAgainDoesNotPileUp) {
  Pair pair;
  constexpr int kFrames = 20;
  pair.in_loop([&] {
    for (int i = 0; i < kFrames; ++i) pair.link->send(abort_number(i));
    for (int i = 0; i < 100'000; ++i) pair.link->send({});
    pair.link->send(abort_number(kFrames));
  });
  for (int i = 0; i <= kFrames; ++i) EXPECT_EQ(pair.read_frame().rank, i);
}

TEST(DetectorLink, FramesInPiecesAreTakenWhole) {
  std::promise<DetectorMessage> got;
  Pair pair([&](const DetectorMessage& message) { got.set_value(message); });
  const std::string frame = pair.sealed(encode(abort_number(7)));
  for (std::size_t at = 0; at < frame.size(); at += 9'000) {
    pair.send_raw(std::string_view(frame).substr(at, 9'000));
  }
  EXPECT_EQ(got.get_future().get().rank, 7);
}

TEST(DetectorLink, WhatIsNoFrameClosesIt) {
  Pair pair;
  pair.send_raw(pair.sealed("\xff\xff\xff\xff"));
  EXPECT_NE(pair.closed.get_future().get().find("a message of 4294967295 bytes where at most 65536 are allowed"),
            std::string::npos);
}

TEST(DetectorLink, AnOwnerThatThrowsLosesThisConnectionAlone) {
  Pair pair([](const DetectorMessage&) { throw std::bad_alloc(); });
  Pair other;
  pair.send_raw(pair.sealed(encode({})));
  EXPECT_NE(pair.closed.get_future().get().find("bad_alloc"), std::string::npos);
  other.other.reset();
  EXPECT_NE(other.closed.get_future().get().find("its process ended"), std::string::npos);
}

// Someone on the way who changes, repeats, leaves out, reflects or makes up what is said.
TEST(DetectorLink, WhatIsNotAuthenticClosesItAndIsNotBelieved) {
  const auto expect_closed = [&](const std::function<std::string(Pair&)>& forge, int believed) {
    int messages = 0;
    Pair pair([&](const DetectorMessage&) { ++messages; });
    pair.send_raw(forge(pair));
    EXPECT_NE(pair.closed.get_future().get().find("not authentic"), std::string::npos);
    EXPECT_EQ(messages, believed);
  };
  const std::string beat = encode({});
  for (std::size_t i = kRecordHeaderBytes; i < beat.size() + kRecordOverhead; ++i) {
    expect_closed(
        [&](Pair& pair) {
          std::string record = pair.sealed(beat);
          record[i] = static_cast<char>(record[i] ^ 1);
          return record;
        },
        0);
  }
  expect_closed(
      [&](Pair& pair) {
        const std::string record = pair.sealed(beat);
        return record + record;
      },
      1);
  expect_closed(
      [&](Pair& pair) {
        pair.sealed(beat);  // left out
        return pair.sealed(beat);
      },
      0);
  expect_closed(
      [&](Pair& pair) {
        pair.in_loop([&] { pair.link->send({}); });
        std::string own(beat.size() + kRecordOverhead, '\0');
        EXPECT_EQ(::recv(pair.other.get(), own.data(), own.size(), MSG_WAITALL), static_cast<ssize_t>(own.size()));
        return own;
      },
      0);
  expect_closed([&](Pair&) { return std::string(64, '\x01'); }, 0);
  expect_closed([&](Pair&) { return beat + std::string(4096, '\x01'); }, 0);
}

}  // namespace

}  // namespace maniple
