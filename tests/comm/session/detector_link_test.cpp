#include "comm/session/detector_link.h"

#include <sys/socket.h>

#include <future>
#include <stdexcept>

#include <gtest/gtest.h>

#include "comm/base/codec.h"

namespace maniple {
namespace {

namespace linked {

using detector::Abort;
using detector::Heartbeat;
using detector::Message;

const ConnectionKeys kHere = derive_keys(preferred_cipher(), TrafficSecret{}, "test", true);
const ConnectionKeys kThere = derive_keys(preferred_cipher(), TrafficSecret{}, "test", false);

// A link whose other end is a socket and its keys.
struct Pair {
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("test");
  UniqueFd other;
  std::shared_ptr<DetectorLink> link;
  std::promise<std::string> closed;
  std::atomic<int> heard{0};
  RecordSealer sealer{kThere.cipher, kThere.send};
  RecordOpener opener{kThere.cipher, kThere.receive};
  std::string unread;

  explicit Pair(std::function<void(Message)> on_message = [](const Message&) {}) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    other = UniqueFd(fds[1]);
    link = std::make_shared<DetectorLink>(loop, SecureConnection(UniqueFd(fds[0]), kHere));
    in_loop([&] {
      link->open({.message = std::move(on_message),
                  .heard = [this] { ++heard; },
                  .closed = [this](const std::string& why) { closed.set_value(why); }});
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
  Message read_frame() {
    const std::string length = read(4);
    return detector::decode(read(ByteReader(length).get<std::uint32_t>()));
  }
  Abort read_abort() { return std::get<Abort>(read_frame()); }
};

Abort abort_number(int number) {
  Abort message{.rank = number};
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
    const Abort message = pair.read_abort();
    EXPECT_EQ(message.rank, i);
    EXPECT_EQ(message.error.reason.size(), 40'000u);
  }
}

TEST(DetectorLink, WhatIsSaidAgainDoesNotPileUp) {
  Pair pair;
  constexpr int kFrames = 20;
  pair.in_loop([&] {
    for (int i = 0; i < kFrames; ++i) pair.link->send(abort_number(i));
    for (int i = 0; i < 100'000; ++i) pair.link->send(Heartbeat{});
    pair.link->send(abort_number(kFrames));
  });
  for (int i = 0; i <= kFrames; ++i) EXPECT_EQ(pair.read_abort().rank, i);
}

TEST(DetectorLink, FramesInPiecesAreTakenWhole) {
  std::promise<Abort> got;
  Pair pair([&](const Message& message) { got.set_value(std::get<Abort>(message)); });
  const std::string frame = pair.sealed(detector::encode(abort_number(7)));
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
  Pair pair([](const Message&) { throw std::bad_alloc(); });
  Pair other;
  pair.send_raw(pair.sealed(detector::encode(Heartbeat{})));
  EXPECT_NE(pair.closed.get_future().get().find("bad_alloc"), std::string::npos);
  other.other.reset();
  EXPECT_NE(other.closed.get_future().get().find("its process ended"), std::string::npos);
}

// Someone on the way who changes, repeats, leaves out, reflects or makes up what is said.
TEST(DetectorLink, WhatIsNotAuthenticClosesItAndIsNotBelieved) {
  const auto expect_closed = [&](const std::function<std::string(Pair&)>& forge, int believed) {
    int messages = 0;
    Pair pair([&](const Message&) { ++messages; });
    pair.send_raw(forge(pair));
    EXPECT_NE(pair.closed.get_future().get().find("not authentic"), std::string::npos);
    EXPECT_EQ(messages, believed);
  };
  const std::string beat = detector::encode(Heartbeat{});
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
        pair.in_loop([&] { pair.link->send(Heartbeat{}); });
        std::string own(beat.size() + kRecordOverhead, '\0');
        EXPECT_EQ(::recv(pair.other.get(), own.data(), own.size(), MSG_WAITALL), static_cast<ssize_t>(own.size()));
        return own;
      },
      0);
  expect_closed([&](Pair&) { return std::string(64, '\x01'); }, 0);
  expect_closed([&](Pair&) { return beat + std::string(4096, '\x01'); }, 0);
}

}  // namespace linked
}  // namespace
}  // namespace maniple
