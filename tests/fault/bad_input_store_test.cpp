// Those who hold the secret and abuse the store: impossible lengths, half a request, unknown operations, too much of
// everything.
#include <optional>
#include <vector>

#include "comm/base/codec.h"
#include "comm/store/wire.h"
#include "fault/bad_input.h"

namespace maniple {
namespace {

class BadStoreClient : public testing::Test {
 protected:
  /// Authentic, but what it sends is up to the test.
  struct Rogue {
    explicit Rogue(const Target& target) : Rogue(target.dial_in(target.identity)) {}
    explicit Rogue(SecureConnection connection) : stream(std::move(connection), kStoreReplies) {}
    void send(std::string plain) {
      stream.queue(std::move(plain));
      while (stream.flush() == 0 && !stream.idle()) {
        pollfd room{.fd = stream.fd(), .events = POLLOUT, .revents = 0};
        ::poll(&room, 1, 100);
      }
    }
    std::optional<Frame> reply() {
      const Deadline deadline = soon();
      for (;;) {
        if (auto message = stream.next()) return frame_of(std::move(*message));
        pollfd waiting{.fd = stream.fd(), .events = POLLIN, .revents = 0};
        if (::poll(&waiting, 1, deadline.poll_ms()) <= 0) return std::nullopt;
        const auto received = stream.receive(buffer);
        using State = MessageStream::Received::State;
        if (received.state == State::end || received.state == State::broken) return std::nullopt;
      }
    }
    MessageStream stream;
    std::array<char, 4096> buffer{};
  };

  void expect_hung_up_on(const std::string& bytes) {
    Rogue rogue(target);
    rogue.send(bytes);
    const auto answer = rogue.reply();
    if (answer) {
      EXPECT_EQ(answer->code, static_cast<std::uint8_t>(StoreStatus::protocol));
      EXPECT_FALSE(rogue.reply().has_value());
    }
    EXPECT_EQ(member->add("count", 0), 7);
  }

  void SetUp() override {
    member = connect_tcp_store("127.0.0.1", target.address().port(), target.identity, soon());
    member->add("count", 7);
  }
  Target target{"store"};
  std::shared_ptr<Store> member;
};

std::uint8_t code(StoreOp op) { return static_cast<std::uint8_t>(op); }

TEST_F(BadStoreClient, N21ImpossibleLengthsEndBeforeAllocation) {
  const std::size_t before = resident_kib();
  for (const std::uint64_t length : {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1} << 32}) {
    expect_hung_up_on(encode_frame_header(1, code(StoreOp::set), length) + std::string(100, 'x'));
  }
  // The largest value that is allowed, only claimed, by many: nothing is set aside for it.
  std::vector<std::unique_ptr<Rogue>> rogues;
  for (int i = 0; i < 50; ++i) {
    rogues.push_back(std::make_unique<Rogue>(target));
    rogues.back()->send(encode_frame_header(1, code(StoreOp::set), kMaxValueBytes));
  }
  EXPECT_EQ(member->add("count", 0), 7);
  EXPECT_LT(resident_kib(), before + 32 * 1024);
}

TEST_F(BadStoreClient, N22LengthsThatOverflowWhenSummed) {
  ByteWriter body;
  body.put(std::uint32_t{2});
  body.put(std::uint32_t{0xffffffff});
  body.put_raw("ab");
  body.put(std::uint32_t{0xffffffff});
  expect_hung_up_on(encode_frame_header(1, code(StoreOp::wait), body.bytes().size()) + body.bytes());
  ByteWriter compare;
  compare.put_string("k");
  compare.put(std::uint32_t{0xfffffff0});
  expect_hung_up_on(encode_frame_header(1, code(StoreOp::compare_set), compare.bytes().size()) + compare.bytes());
}

TEST_F(BadStoreClient, N24ATruncatedFrameThenTheEnd) {
  {
    Rogue rogue(target);
    rogue.send(encode_frame_header(1, code(StoreOp::set), 1000) + "half of it");
  }
  EXPECT_EQ(member->add("count", 0), 7);
  EXPECT_EQ(member->num_keys(), 1);
}

TEST_F(BadStoreClient, N26UnknownOperations) {
  for (const int op : {0, 10, 200, 255}) expect_hung_up_on(encode_frame_header(1, static_cast<std::uint8_t>(op), 0));
}

TEST_F(BadStoreClient, N29AbuseIsAnErrorToThatClientOnly) {
  // A value of 1 GiB.
  expect_hung_up_on(encode_frame_header(1, code(StoreOp::set), std::uint64_t{1} << 30));
  EXPECT_THROW(member->set("large", std::string(kMaxValueBytes + 1, 'x')), InvalidArgument);
  // A wait for a million keys.
  const std::string keys = encode_keys(std::vector<std::string>(1'000'000, "k"));
  Rogue rogue(target);
  rogue.send(encode_frame_header(5, code(StoreOp::wait), keys.size()) + keys);
  const auto answer = rogue.reply();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->id, 5u);
  EXPECT_EQ(answer->code, static_cast<std::uint8_t>(StoreStatus::invalid));
  // That one may go on.
  rogue.send(encode_frame_header(6, code(StoreOp::num_keys), 0));
  EXPECT_EQ(rogue.reply()->id, 6u);
  // Keys are bytes: these are odd, but keys.
  for (const std::string& key : {std::string("\0", 1), std::string("\xff\xfe"), std::string("a\0b", 3)}) {
    member->set(key, "v");
    EXPECT_EQ(member->get(key, soon()), "v");
  }
}

}  // namespace
}  // namespace maniple
