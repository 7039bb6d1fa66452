// Things that strangers, leftovers and broken peers send, by the numbers of the list of bad inputs: each against a
// store server and against a plain acceptor. After each the listener must still serve its own.
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <thread>
#include <vector>

#include "base/codec.h"
#include "net/descriptor_limit.h"
#include "net/handshake_wire.h"
#include "store/tcp_store.h"
#include "store/wire.h"
#include <maniple/comm/error.h>
#include <maniple/comm/options.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;

Deadline soon() { return Deadline::after(seconds(30)); }

double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

std::size_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::stoul(line.substr(6));
  }
  return 0;
}

/// A raw connection, as a stranger has it.
class Raw {
 public:
  explicit Raw(const Address& address) : fd_(connect_to(address, soon())) {}
  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EAGAIN) {
        pollfd room{.fd = fd_.get(), .events = POLLOUT, .revents = 0};
        ::poll(&room, 1, 100);
        continue;
      }
      if (sent < 0) return;  // it has hung up, which the reader will see
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }
  /// Until the other side has taken everything in, so that what follows is a segment of its own.
  void settle() {
    int unsent = 1;
    while (::ioctl(fd_.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0) std::this_thread::yield();
  }
  std::string receive(std::size_t count) {
    std::string bytes(count, '\0');
    std::size_t got = 0;
    while (got < count && readable(soon())) {
      const ssize_t more = ::recv(fd_.get(), bytes.data() + got, count - got, 0);
      if (more == 0 || (more < 0 && errno != EAGAIN)) break;
      if (more > 0) got += static_cast<std::size_t>(more);
    }
    bytes.resize(got);
    return bytes;
  }
  bool readable(Deadline deadline) {
    pollfd waiting{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    return ::poll(&waiting, 1, deadline.poll_ms()) > 0;
  }
  /// Whether it is hung up on before the deadline; `rest` gets what came before.
  bool closed_by(Deadline deadline, std::string* rest = nullptr) {
    while (readable(deadline)) {
      char bytes[4096];
      const ssize_t got = ::recv(fd_.get(), bytes, sizeof(bytes), 0);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
      if (got > 0 && rest != nullptr) rest->append(bytes, static_cast<std::size_t>(got));
    }
    return false;
  }
  std::uint16_t port() const { return Address::of_socket(fd_.get()).port(); }
  int fd() const { return fd_.get(); }
  void reset_connection() {
    const linger hard{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
    fd_.reset();
  }

 private:
  UniqueFd fd_;
};

/// A listener under test.
struct Target {
  explicit Target(const std::string& kind) : is_store(kind == "store") {
    identity.secret = Secret::random();
    identity.job = "training";
    identity.generation = 4;
    identity.world_size = 8;
    if (is_store) {
      server = std::make_unique<TcpStoreServer>(Address::parse("127.0.0.1:0"), identity);
    } else {
      const auto accept = [this](UniqueFd& fd, const Hello&, const Address&) -> std::string {
        const UniqueFd taken = std::move(fd);
        ++accepted;
        return {};
      };
      acceptor = std::make_unique<Acceptor>(loop, listen_on(Address::parse("127.0.0.1:0")), identity, accept,
                                            HandshakeLimits{.handshake = milliseconds(400)});
    }
  }
  Address address() const { return is_store ? server->address() : acceptor->address(); }
  double handshake_seconds() const { return is_store ? 5.0 : 0.4; }

  UniqueFd dial_in(const Identity& as, std::int32_t rank = 1) const {
    return dial(address(), as, {.role = Role::store, .rank = rank, .topic = "x"}, soon());
  }
  std::string refusal(const Identity& as, std::int32_t rank = 1) const {
    try {
      dial_in(as, rank);
    } catch (const ProtocolError& error) {
      return error.what();
    }
    return "accepted";
  }
  bool serves() const { return static_cast<bool>(dial_in(identity)); }
  WireHello hello() const {
    WireHello wire{
        .role = Role::store, .generation = 4, .world_size = 8, .rank = 1, .nonce = {}, .job = "training", .topic = "x"};
    fill_random(wire.nonce);
    return wire;
  }

  bool is_store;
  Identity identity;
  std::atomic<int> accepted{0};
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("test");
  std::unique_ptr<Acceptor> acceptor;
  std::unique_ptr<TcpStoreServer> server;
};

class BadInput : public testing::TestWithParam<const char*> {
 protected:
  template <class F>
  std::string logged(F&& body) {
    testing::internal::CaptureStderr();
    body();
    EXPECT_TRUE(target.serves());  // also: whatever was sent before has been dealt with
    return testing::internal::GetCapturedStderr();
  }
  Target target{GetParam()};
};

TEST_P(BadInput, N01N02ScansAreSilent) {
  const auto before = descriptor_use().open;
  const std::string log = logged([&] {
    for (int i = 0; i < 100; ++i) Raw stranger(target.address());
    for (int i = 0; i < 100; ++i) Raw(target.address()).reset_connection();
  });
  EXPECT_EQ(log, "");
  const Deadline deadline = soon();
  while (descriptor_use().open > before && !deadline.expired()) std::this_thread::yield();
  EXPECT_LE(descriptor_use().open, before);
}

TEST_P(BadInput, N03N07SilentAndSlowPeersAreClosedInTime) {
  const auto start = Deadline::Clock::now();
  const std::string log = logged([&] {
    Raw silent(target.address());
    Raw slow(target.address());
    const std::string hello = encode_hello(target.hello());
    std::size_t sent = 0;
    const double pace = target.handshake_seconds() / 8;
    // A byte now and then: the limit is for the whole, so it does not help.
    while (sent < hello.size() && !slow.closed_by(Deadline::after(Seconds(pace)))) slow.send(hello.substr(sent++, 1));
    EXPECT_LE(sent, 10u);
    EXPECT_TRUE(silent.closed_by(soon()));
  });
  EXPECT_GE(seconds_since(start), target.handshake_seconds() * 0.9);
  EXPECT_LT(seconds_since(start), target.handshake_seconds() + 3);
  EXPECT_THAT(log, HasSubstr("no handshake within"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

TEST_P(BadInput, N04N05N06N09StrangersAreNamedAndClosed) {
  const std::pair<std::string, const char*> strangers[] = {
      {"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP client on training port"},
      {std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + std::string(500, 'r'), "TLS client"},
      {"SSH-2.0-OpenSSH_9.2\r\n", "SSH client"},
      {"*1\r\n$4\r\nPING\r\n", "Redis client"},
      {"\x93MNPX\r\n\x1a and more", "wrong magic"},
  };
  for (const auto& [bytes, expected] : strangers) {
    std::uint16_t port = 0;
    const std::string log = logged([&] {
      Raw stranger(target.address());
      port = stranger.port();
      stranger.send(bytes);
      EXPECT_TRUE(stranger.closed_by(soon()));
    });
    EXPECT_THAT(log, AllOf(HasSubstr(expected), HasSubstr("127.0.0.1:" + std::to_string(port))));
  }
}

TEST_P(BadInput, N04ManyStrangersAreOneLine) {
  const std::string log = logged([&] {
    for (int i = 0; i < 50; ++i) {
      Raw stranger(target.address());
      stranger.send("GET / HTTP/1.1\r\n\r\n");
      EXPECT_TRUE(stranger.closed_by(soon()));
    }
  });
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

TEST_P(BadInput, N08AHelloSplitAtEveryByteIsAccepted) {
  const std::size_t length = encode_hello(target.hello()).size();
  for (std::size_t cut = 1; cut < length; ++cut) {
    Raw peer(target.address());
    const std::string hello = encode_hello(target.hello());
    peer.send(hello.substr(0, cut));
    peer.settle();
    peer.send(hello.substr(cut));
    const std::string challenge = peer.receive(kChallengeBytes);
    ASSERT_EQ(challenge.size(), kChallengeBytes) << cut;
    const std::string prefix = challenge.substr(0, kChallengeBytes - kMacBytes);
    const Mac proof = prove(target.identity.secret, Direction::from_dialler, hello, prefix);
    const std::size_t half = cut % kMacBytes;
    peer.send(as_text(proof).substr(0, half));
    peer.settle();
    peer.send(as_text(proof).substr(half));
    ASSERT_EQ(peer.receive(kVerdictHeaderBytes), encode_verdict("")) << cut;
  }
}

TEST_P(BadInput, N10OtherVersionsAreNamedToBothSides) {
  const std::string log = logged([&] {
    for (const std::uint16_t version : {std::uint16_t{0}, std::uint16_t{99}}) {
      Raw peer(target.address());
      std::string hello = encode_hello(target.hello());
      hello[8] = static_cast<char>(version);
      hello[10] = hello[11] = '\xff';  // a length that only the other version could understand
      peer.send(hello);
      const std::string answer = peer.receive(kHeaderBytes);
      ASSERT_EQ(answer.size(), kHeaderBytes);
      EXPECT_EQ(decode_header(answer).version, kProtocolVersion);
      EXPECT_TRUE(peer.closed_by(soon()));
    }
  });
  EXPECT_THAT(log, AllOf(HasSubstr("version 0"), HasSubstr("version 1")));
}

TEST(BadServer, N10TheDiallerNamesBothVersions) {
  const UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  std::thread server([&] {
    pollfd waiting{.fd = listener.get(), .events = POLLIN, .revents = 0};
    ::poll(&waiting, 1, 20'000);
    const UniqueFd fd(::accept(listener.get(), nullptr, nullptr));
    std::string answer = encode_challenge_prefix(ChallengeStatus::version_refused, {}) + std::string(kMacBytes, '\0');
    answer[8] = 99;
    ::send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    char bytes[1024];
    while (::recv(fd.get(), bytes, sizeof(bytes), 0) > 0) {
    }
  });
  try {
    dial(Address::of_socket(listener.get()), {}, {}, soon());
    ADD_FAILURE() << "accepted";
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("version 99"), HasSubstr("version 1")));
  }
  server.join();
}

TEST_P(BadInput, N11WithoutTheSecretNobodyGetsIn) {
  Identity thief = target.identity;
  thief.secret = Secret::random();
  const std::string log = logged([&] {
    EXPECT_THAT(target.refusal(thief), HasSubstr("secret"));
    thief.secret = Secret::none();
    EXPECT_THAT(target.refusal(thief), HasSubstr("secret"));
    Raw peer(target.address());
    peer.send(encode_hello(target.hello()));
    ASSERT_EQ(peer.receive(kChallengeBytes).size(), kChallengeBytes);
    peer.send(std::string(kMacBytes, 'm'));
    std::string verdict;
    EXPECT_TRUE(peer.closed_by(soon(), &verdict));
    EXPECT_THAT(verdict, HasSubstr("secret"));
    EXPECT_THAT(verdict, testing::Not(HasSubstr("training")));  // nor anything else about the job
  });
  EXPECT_THAT(log, HasSubstr("secret"));
}

TEST_P(BadInput, N12N13N16N17AuthenticPeersThatDoNotBelongHereAreToldWhy) {
  Identity other = target.identity;
  other.job = "another";
  EXPECT_THAT(target.refusal(other), HasSubstr("this is job \"training\", not \"another\""));
  other = target.identity;
  other.generation = 3;
  EXPECT_THAT(target.refusal(other), HasSubstr("superseded by generation 4"));
  other.generation = 5;
  EXPECT_THAT(target.refusal(other), HasSubstr("generation 4 is over"));
  other = target.identity;
  other.world_size = 16;
  EXPECT_THAT(target.refusal(other), AllOf(HasSubstr("world size is 8"), HasSubstr("16"), HasSubstr("127.0.0.1")));
  EXPECT_THAT(target.refusal(target.identity, 8), HasSubstr("rank 8"));
  other = target.identity;
  other.rank = -7;
  EXPECT_THAT(target.refusal(other, -1), HasSubstr("rank -7"));
  EXPECT_TRUE(target.serves());
}

TEST_P(BadInput, N14AReplayedHandshakeIsRefused) {
  const std::string hello = encode_hello(target.hello());
  std::string proof;
  {
    Raw honest(target.address());
    honest.send(hello);
    const std::string challenge = honest.receive(kChallengeBytes);
    proof = as_text(prove(target.identity.secret, Direction::from_dialler, hello,
                          challenge.substr(0, kChallengeBytes - kMacBytes)));
    honest.send(proof);
    ASSERT_EQ(honest.receive(kVerdictHeaderBytes), encode_verdict(""));
  }
  Raw replay(target.address());
  replay.send(hello + proof);
  std::string answer;
  EXPECT_TRUE(replay.closed_by(soon(), &answer));
  EXPECT_THAT(answer, HasSubstr("secret"));
  EXPECT_TRUE(target.serves());
}

TEST_P(BadInput, N15AReflectedProofIsRefused) {
  Raw peer(target.address());
  peer.send(encode_hello(target.hello()));
  const std::string challenge = peer.receive(kChallengeBytes);
  ASSERT_EQ(challenge.size(), kChallengeBytes);
  peer.send(challenge.substr(kChallengeBytes - kMacBytes));
  std::string answer;
  EXPECT_TRUE(peer.closed_by(soon(), &answer));
  EXPECT_THAT(answer, HasSubstr("secret"));
  EXPECT_TRUE(target.serves());
}

TEST_P(BadInput, N21HelloLengthsAreBounded) {
  for (const std::size_t at : {std::size_t{10}, kHeaderBytes + 45}) {  // of the body, and of the job's name
    Raw peer(target.address());
    std::string hello = encode_hello(target.hello());
    hello[at] = hello[at + 1] = '\xff';
    peer.send(hello);
    EXPECT_TRUE(peer.closed_by(soon()));
  }
  EXPECT_TRUE(target.serves());
}

TEST_P(BadInput, N28AFloodDoesNotReachTheMembers) {
  raise_descriptor_limit();
  const auto open_before = descriptor_use().open;
  const std::size_t memory_before = resident_kib();
  std::shared_ptr<Store> member;
  if (target.is_store) {
    member = connect_tcp_store("127.0.0.1", target.address().port(), target.identity, soon());
  }
  const auto one_call = [&] {
    const auto start = Deadline::Clock::now();
    if (member) member->add("count", 1);
    return seconds_since(start);
  };
  const auto median = [](std::vector<double> times) {
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    return times[times.size() / 2];
  };
  std::vector<double> calm;
  for (int i = 0; i < 200; ++i) calm.push_back(one_call());

  constexpr int kConnections = 10'000;
  constexpr std::size_t kOpenAtOnce = 400;
  // In a thread of its own: the flooding one uses up its share of the processor.
  std::vector<double> flooded = {0};
  std::atomic<bool> over{false};
  std::thread member_calls([&] {
    while (!over && member) flooded.push_back(one_call());
  });
  std::size_t most_open = 0;
  {
    std::vector<UniqueFd> open(kOpenAtOnce);
    const Address address = target.address();
    for (int i = 0; i < kConnections; ++i) {
      UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      ::connect(fd.get(), address.get(), address.length());
      open[static_cast<std::size_t>(i) % kOpenAtOnce] = std::move(fd);
      if (i % 1000 != 999) continue;
      most_open = std::max<std::size_t>(most_open, descriptor_use().open);
    }
    EXPECT_LE(most_open, open_before + kOpenAtOnce + 64 + 16);
  }
  over = true;
  member_calls.join();
  const auto start = Deadline::Clock::now();
  EXPECT_TRUE(target.serves());
  std::printf("newcomer served %.3f s after the flood", seconds_since(start));
  EXPECT_LT(seconds_since(start), 5.0);
  if (member) {
    std::printf("; a member's call: %.0f us before, %.0f us in the flood", median(calm) * 1e6, median(flooded) * 1e6);
    EXPECT_LT(median(flooded), 0.05);
  }
  std::printf("\n");
  EXPECT_LT(resident_kib(), memory_before + 16 * 1024);
}

INSTANTIATE_TEST_SUITE_P(All, BadInput, testing::Values("store", "data"),
                         [](const auto& kind) { return std::string(kind.param); });

// --- from a peer that holds the secret ---

class BadStoreClient : public testing::Test {
 protected:
  /// Authentic, but what it sends is up to the test.
  struct Rogue {
    explicit Rogue(const Target& target) : fd(target.dial_in(target.identity)) {}
    void send(std::string_view bytes) const {
      while (!bytes.empty()) {
        const ssize_t sent = ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (sent > 0) bytes.remove_prefix(static_cast<std::size_t>(sent));
        if (sent < 0 && errno != EAGAIN) return;
        if (sent < 0) {
          pollfd room{.fd = fd.get(), .events = POLLOUT, .revents = 0};
          ::poll(&room, 1, 100);
        }
      }
    }
    std::optional<Frame> reply() {
      const Deadline deadline = soon();
      for (;;) {
        std::string_view rest = unread;
        auto frame = reader.next(rest);
        unread = std::string(rest);
        if (frame) return frame;
        pollfd waiting{.fd = fd.get(), .events = POLLIN, .revents = 0};
        if (::poll(&waiting, 1, deadline.poll_ms()) <= 0) return std::nullopt;
        char buffer[4096];
        const ssize_t got = ::recv(fd.get(), buffer, sizeof(buffer), 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) return std::nullopt;
        if (got > 0) unread.assign(buffer, static_cast<std::size_t>(got));
      }
    }
    UniqueFd fd;
    FrameReader reader{&reply_limit};
    std::string unread;
  };

  void expect_hung_up_on(std::string_view bytes) {
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
