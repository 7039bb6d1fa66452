#include "comm/net/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/net/handshake_wire.h"
#include "comm/net/own_network.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

Identity sample_identity() {
  Identity identity;
  identity.secret = Secret::random();
  identity.job = "test";
  identity.generation = 4;
  identity.world_size = 8;
  return identity;
}

/// Keeps what it accepts.
struct Host {
  explicit Host(const Identity& identity, const Address& address = Address::parse("127.0.0.1:0"),
                HandshakeLimits limits = {})
      : acceptor(loop, listen_on(address), identity,
                 {.refusal = [](const Hello& hello, const Address&) -> std::string {
                    return hello.topic == "unwanted" ? "nobody asked for that" : "";
                  },
                  .accept =
                      [this](SecureConnection fd, const Hello& hello, const Address&) {
                        const std::lock_guard lock(mutex);
                        accepted.push_back(std::move(fd));
                        hellos.push_back(hello);
                      }},
                 limits) {}
  /// The dialler has the verdict before the owner has the connection; after this the owner has it.
  void finish_turn() {
    loop->post_and_wait([] {});
  }
  std::mutex mutex;
  std::vector<SecureConnection> accepted;
  std::vector<Hello> hellos;
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("test");
  Acceptor acceptor;
};

std::string refusal(const Host& host, const Identity& identity, const Hello& hello = {}) {
  try {
    dial(host.acceptor.address(), identity, hello, Deadline::after(seconds(20)));
  } catch (const ProtocolError& error) {
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

TEST(Handshake, AcceptsItsOwnAndPassesTheHello) {
  const Identity identity = sample_identity();
  Host host(identity);
  const SecureConnection fd = dial(host.acceptor.address(), identity,
                                   {.role = Role::data, .rank = 5, .topic = "world/1:c"}, Deadline::after(seconds(20)));
  host.finish_turn();
  const std::lock_guard lock(host.mutex);
  ASSERT_EQ(host.hellos.size(), 1u);
  EXPECT_EQ(host.hellos[0].role, Role::data);
  EXPECT_EQ(host.hellos[0].rank, 5);
  EXPECT_EQ(host.hellos[0].topic, "world/1:c");
  // Bytes that follow at once are the owner's, not the handshake's.
  ASSERT_EQ(::send(fd.get(), "abc", 3, 0), 3);
  pollfd readable{.fd = host.accepted[0].get(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&readable, 1, 10'000), 1);
  char bytes[8];
  EXPECT_EQ(::recv(host.accepted[0].get(), bytes, sizeof(bytes), 0), 3);
  EXPECT_EQ(host.acceptor.refused(), 0u);
}

TEST(Handshake, TakesTheRankFromTheIdentity) {
  Identity identity = sample_identity();
  Host host(identity);
  identity.rank = 6;
  const SecureConnection fd =
      dial(host.acceptor.address(), identity, {.role = Role::store, .topic = {}}, Deadline::after(seconds(20)));
  host.finish_turn();
  const std::lock_guard lock(host.mutex);
  EXPECT_EQ(host.hellos.at(0).rank, 6);
}

TEST(Handshake, WorksOverUnixSockets) {
  const Identity identity = sample_identity();
  Host host(identity, Address::unix_abstract("maniple-handshake-" + std::to_string(::getpid())));
  const SecureConnection fd = dial(host.acceptor.address(), identity,
                                   {.role = Role::segment, .rank = 1, .topic = "key"}, Deadline::after(seconds(20)));
  EXPECT_TRUE(static_cast<bool>(fd));
}

/// The hello that a dialler sends there.
WireHello hello_sent_to(const std::string& host, const Hello& hello) {
  const UniqueFd listener = listen_on(Address::parse(host + ":0"));
  EXPECT_THROW(dial(Address::of_socket(listener.get()), sample_identity(), hello, Deadline::after(milliseconds(50))),
               Timeout);
  const UniqueFd fd(::accept(listener.get(), nullptr, nullptr));
  char bytes[kMaxHandshakeBytes];
  const ssize_t got = ::recv(fd.get(), bytes, sizeof bytes, 0);
  return decode_hello(std::string_view(bytes, static_cast<std::size_t>(got)).substr(kHeaderBytes));
}

TEST(Handshake, ExchangesKeysWhereRecordsLeaveTheHost) {
  in_own_network([] {
    run("ip link set lo up");
    run("ip addr add 192.0.2.9/32 dev lo");
    const auto exchanged = [](const std::string& host, Role role, bool encrypt) {
      return hello_sent_to(host, {.role = role, .rank = 1, .topic = "x", .encrypt = encrypt}).ephemeral;
    };
    EXPECT_TRUE(exchanged("192.0.2.9", Role::store, false));
    EXPECT_TRUE(exchanged("192.0.2.9", Role::control, false));
    EXPECT_TRUE(exchanged("192.0.2.9", Role::data, true));
    EXPECT_FALSE(exchanged("192.0.2.9", Role::data, false));
    EXPECT_FALSE(exchanged("127.0.0.1", Role::store, false));
    EXPECT_FALSE(exchanged("127.0.0.1", Role::data, true));
  });
}

TEST(Handshake, RefusesWithAReason) {
  const Identity identity = sample_identity();
  Host host(identity);
  Identity other = identity;
  other.secret = Secret::random();
  EXPECT_THAT(refusal(host, other), HasSubstr("secret"));
  other = identity;
  other.job = "another";
  EXPECT_THAT(refusal(host, other), HasSubstr("this is job \"test\", not \"another\""));
  other = identity;
  other.generation = 3;
  EXPECT_THAT(refusal(host, other), HasSubstr("superseded by generation 4"));
  other = identity;
  other.world_size = 4;
  EXPECT_THAT(refusal(host, other), HasSubstr("world size is 8 at"));
  EXPECT_THAT(refusal(host, identity, {.role = Role::data, .rank = 8, .topic = ""}), HasSubstr("rank 8"));
  EXPECT_THAT(refusal(host, identity, {.role = Role::data, .rank = 1, .topic = "unwanted"}),
              HasSubstr("nobody asked for that"));
  // The acceptor counts after it has sent the verdict.
  const Deadline context = Deadline::after(seconds(10));
  while (host.acceptor.refused() < 6 && !context.expired()) std::this_thread::yield();
  EXPECT_EQ(host.acceptor.refused(), 6u);
  EXPECT_TRUE(host.accepted.empty());
}

TEST(Handshake, DialGivesUpAtItsDeadline) {
  // A listener that nobody serves: the kernel connects, no one answers.
  const UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  const auto start = Deadline::Clock::now();
  EXPECT_THROW(dial(Address::of_socket(listener.get()), sample_identity(), {}, Deadline::after(milliseconds(100))),
               Timeout);
  EXPECT_LT(Deadline::Clock::now() - start, seconds(5));
}

TEST(Handshake, DialNamesAServerOfAnotherKind) {
  const UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  std::thread server([&] {
    pollfd waiting{.fd = listener.get(), .events = POLLIN, .revents = 0};
    ::poll(&waiting, 1, 20'000);
    const UniqueFd fd(::accept(listener.get(), nullptr, nullptr));
    const std::string answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    ::send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    char bytes[1024];
    while (::recv(fd.get(), bytes, sizeof(bytes), 0) > 0) {
    }
  });
  try {
    dial(Address::of_socket(listener.get()), sample_identity(), {}, Deadline::after(seconds(20)));
    ADD_FAILURE() << "accepted";
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), HasSubstr("HTTP"));
  }
  server.join();
}

TEST(Handshake, ManyDialAtOnceWithFewPlaces) {
  const Identity identity = sample_identity();
  Host host(identity, Address::parse("127.0.0.1:0"), {.unauthenticated = 4, .grace = milliseconds(200)});
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 64; ++i) {
    threads.emplace_back([&, i] {
      const SecureConnection fd = dial(host.acceptor.address(), identity,
                                       {.role = Role::data, .rank = i % 8, .topic = "x"}, Deadline::after(seconds(60)));
      if (fd) ++done;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(done, 64);
}

TEST(Handshake, TheWelcomeGoesOutBeforeAnythingTheOwnerSends) {
  const Identity identity = sample_identity();
  auto loop = std::make_shared<EventLoop>("test");
  // An owner that writes as soon as it has the connection, as one that was waiting for it in another thread may.
  Acceptor acceptor(loop, listen_on(Address::parse("127.0.0.1:0")), identity,
                    {.refusal = {}, .accept = [](SecureConnection fd, const Hello&, const Address&) {
                       EXPECT_EQ(::send(fd.get(), "first words", 11, MSG_NOSIGNAL), 11);
                     }});
  const SecureConnection connection = dial(acceptor.address(), identity, {.role = Role::data, .rank = 1, .topic = "x"},
                                           Deadline::after(std::chrono::seconds(30)));
  pollfd ready{connection.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, 30'000), 1);
  char words[12] = {};
  EXPECT_EQ(::recv(connection.get(), words, 11, 0), 11);
  EXPECT_STREQ(words, "first words");
}

TEST(Handshake, TheAcceptorMayEndAtAnyTime) {
  const Identity identity = sample_identity();
  for (int i = 0; i < 20; ++i) {
    auto host = std::make_unique<Host>(identity);
    const Address address = host->acceptor.address();
    std::thread dialler([&] {
      try {
        dial(address, identity, {.role = Role::data, .rank = 0, .topic = ""}, Deadline::after(milliseconds(200)));
      } catch (const Error&) {
        // either is fine: accepted before the end, or refused by it
      }
    });
    host.reset();
    dialler.join();
  }
}

}  // namespace
}  // namespace maniple
