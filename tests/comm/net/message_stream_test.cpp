#include "comm/net/message_stream.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <numeric>
#include <vector>

#include <gtest/gtest.h>

namespace maniple {
namespace {

using State = MessageStream::Received::State;
constexpr std::uint32_t kLimit = 1 << 20;
constexpr MessageFormat kFormat = length_prefixed<kLimit>();

std::string framed(std::string_view body) {
  ByteWriter writer;
  writer.put_string(body);
  return writer.take();
}

std::string pattern(std::size_t size) {
  std::string bytes(size, '\0');
  std::iota(bytes.begin(), bytes.end(), '\0');
  return bytes;
}

TEST(MessageReader, AnySplitGivesTheSameMessages) {
  const std::string bytes = framed("first") + framed("") + framed("third");
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    MessageReader reader(kFormat);
    std::vector<std::string> bodies;
    for (std::string_view part : {std::string_view(bytes).substr(0, cut), std::string_view(bytes).substr(cut)}) {
      while (auto message = reader.next(part)) bodies.push_back(std::move(message->body));
      EXPECT_TRUE(part.empty());
    }
    EXPECT_EQ(bodies, (std::vector<std::string>{"first", "", "third"})) << cut;
    EXPECT_FALSE(reader.in_message());
  }
}

TEST(MessageReader, KnowsWhetherItIsInsideAMessage) {
  const std::string bytes = framed("body");
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    MessageReader reader(kFormat);
    std::string_view part = std::string_view(bytes).substr(0, cut);
    EXPECT_FALSE(reader.next(part).has_value());
    EXPECT_EQ(reader.in_message(), cut > 0) << cut;
  }
}

TEST(MessageReader, TheHeaderStaysThatOfTheLastMessage) {
  MessageReader reader(kFormat);
  const std::string bytes = framed("body") + "\1\0";
  std::string_view rest = bytes;
  EXPECT_TRUE(reader.next(rest).has_value());
  EXPECT_FALSE(reader.next(rest).has_value());
  EXPECT_EQ(reader.header(), framed("body").substr(0, kFormat.header_bytes));
}

TEST(MessageReader, RefusesAMessageThatIsTooLong) {
  for (const std::uint32_t length : {kLimit + 1, 0xffffffffu}) {
    MessageReader reader(kFormat);
    ByteWriter header;
    header.put(length);
    std::string_view bytes = header.bytes();
    try {
      reader.next(bytes);
      ADD_FAILURE() << length;
    } catch (const ProtocolError& error) {
      EXPECT_EQ(std::string(error.what()),
                "a message of " + std::to_string(length) + " bytes where at most 1048576 are allowed");
    }
  }
}

class Streams : public testing::Test {
 protected:
  static SecureConnection connection(int fd, bool dialler) {
    return SecureConnection(UniqueFd(fd), derive_keys(preferred_cipher(), TrafficSecret{}, "test", dialler));
  }
  void SetUp() override {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    here.emplace(connection(fds[0], true), kFormat, 4);
    there.emplace(connection(fds[1], false), kFormat);
  }

  State receive() {
    const auto received = there->receive(room);
    while (auto message = there->next()) bodies.push_back(std::move(message->body));
    return received.state;
  }

  std::optional<MessageStream> here;
  std::optional<MessageStream> there;
  std::array<char, 1000> room{};  // small, so that records and messages arrive in pieces
  std::vector<std::string> bodies;
};

TEST_F(Streams, MessagesArriveWholeAndInOrder) {
  std::vector<std::string> sent;
  for (const std::size_t size : {0, 1, 999, 1000, 70'000, 1 << 20, 3}) {
    sent.push_back(pattern(size));
    here->queue(framed(sent.back()));
  }
  while (bodies.size() < sent.size()) {
    ASSERT_EQ(here->flush(), 0);
    ASSERT_EQ(receive(), State::bytes);
  }
  EXPECT_EQ(bodies, sent);
  EXPECT_EQ(here->flush(), 0);
  EXPECT_TRUE(here->idle());
  EXPECT_EQ(here->queued_bytes(), 0u);
  EXPECT_EQ(receive(), State::nothing);
}

TEST_F(Streams, WhatTheSocketDoesNotTakeStaysQueued) {
  const std::string body = pattern(kLimit);
  here->queue(framed(""));
  const std::string frame = framed(body);
  for (int i = 0; i < 4; ++i) here->queue_borrowed(frame);  // far more than a socket takes
  EXPECT_EQ(here->flush(), 0);
  EXPECT_FALSE(here->idle());
  EXPECT_GT(here->queued_bytes(), frame.size());
  while (bodies.size() < 5) {
    EXPECT_EQ(here->flush(), 0);
    receive();
  }
  EXPECT_TRUE(here->idle());
  EXPECT_EQ(bodies, (std::vector<std::string>{"", body, body, body, body}));
}

TEST_F(Streams, PartsOfAMessageAreOneMessage) {
  const std::string head = framed(std::string(100, 'x')).substr(0, kFormat.header_bytes);
  here->queue(head);
  here->queue_borrowed("");
  for (int i = 0; i < 100; ++i) here->queue("x");  // more parts than fit into one system call
  while (bodies.empty()) {
    EXPECT_EQ(here->flush(), 0);
    receive();
  }
  EXPECT_EQ(bodies.front(), std::string(100, 'x'));
}

TEST_F(Streams, TellsAnEndBetweenMessagesFromOneInside) {
  here->queue(framed("whole"));
  here->flush();
  EXPECT_EQ(receive(), State::bytes);
  EXPECT_EQ(there->end_text(), "closed");
  here->queue(framed("cut off").substr(0, 9));
  here->flush();
  here->close();
  EXPECT_FALSE(here->is_open());
  EXPECT_EQ(receive(), State::bytes);
  EXPECT_EQ(receive(), State::end);
  EXPECT_EQ(there->end_text(), "closed in the middle of a message");
  EXPECT_EQ(bodies, std::vector<std::string>{"whole"});
}

TEST_F(Streams, WritingToAnEndedConnectionFails) {
  there->close();
  here->queue(framed("lost"));
  EXPECT_EQ(here->flush(), EPIPE);
  EXPECT_EQ(here->receive(room).state, State::end);
}

TEST_F(Streams, BytesThatAreNotAuthenticAreRefused) {
  const std::string forged(64, '\1');
  ASSERT_EQ(::send(here->fd(), forged.data(), forged.size(), 0), static_cast<ssize_t>(forged.size()));
  EXPECT_THROW(while (there->receive(room).state == State::bytes) there->next(), ProtocolError);
  EXPECT_THROW(there->next(), ProtocolError);
}

TEST_F(Streams, OnlyAuthenticBytesAreHeard) {
  const auto before = there->heard();
  EXPECT_EQ(::send(here->fd(), "\x40\0\0", 3, 0), 3);  // the beginning of a record
  EXPECT_EQ(receive(), State::bytes);
  EXPECT_EQ(there->heard(), before);
}

TEST_F(Streams, AConnectionWithoutKeysIsRefused) {
  EXPECT_THROW(MessageStream(SecureConnection(UniqueFd{}), kFormat), std::exception);
}

}  // namespace
}  // namespace maniple
