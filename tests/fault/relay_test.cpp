// Someone on the path, without the secret, who relays the handshake and then changes, drops, repeats, reflects or adds
// bytes: it is noticed, with a typed error, and nothing but what was really said is done.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "comm/net/handshake_wire.h"
#include "comm/store/tcp_store.h"
#include "harness/relay.h"
#include "launch/coordinate/agent_link.h"
#include "launch/coordinate/launcher_listener.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using harness::Relay;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

Identity identity_of(int rank) {
  Identity identity;
  for (std::size_t i = 0; i < identity.secret.bytes.size(); ++i)
    identity.secret.bytes[i] = static_cast<std::uint8_t>(i);
  identity.world_size = 4;
  identity.rank = rank;
  return identity;
}

enum class Harm { change, drop, insert };

/// Corrupts one byte of one direction.
Relay::Tamper harm_at(Relay::Way chosen, std::size_t position, Harm harm) {
  return [=](Relay::Way way, std::size_t offset, std::string bytes) {
    if (way != chosen || position < offset || position >= offset + bytes.size()) return bytes;
    const std::size_t at = position - offset;
    switch (harm) {
      case Harm::change: bytes[at] = static_cast<char>(bytes[at] ^ 0x21); break;
      case Harm::drop: bytes.erase(at, 1); break;
      case Harm::insert: bytes.insert(at, 1, 'x'); break;
    }
    return bytes;
  };
}

// ---- The store ---------------------------------------------------------------------------------------------------

class RelayedStore : public testing::Test {
 protected:
  std::shared_ptr<Store> through(const Relay& relay, Deadline deadline) {
    return connect_tcp_store("127.0.0.1", relay.address().port(), identity_of(1), deadline);
  }
  void SetUp() override {
    direct = connect_tcp_store("127.0.0.1", server.address().port(), identity_of(0), Deadline::after(seconds(30)));
    direct->set("there", "value");
  }
  TcpStoreServer server{Address::parse("127.0.0.1:0"), identity_of(0)};
  std::shared_ptr<Store> direct;
};

TEST_F(RelayedStore, EveryHarmedByteOfHandshakeAndRequestsIsNoticed) {
  std::array<std::atomic<std::size_t>, 2> said{};
  {
    const Relay honest(server.address(), [&](Relay::Way way, std::size_t offset, std::string bytes) {
      said[way] = offset + bytes.size();
      return bytes;
    });
    const auto store = through(honest, Deadline::after(seconds(30)));
    EXPECT_EQ(store->get("there", Deadline::after(seconds(30))), "value");
  }
  ASSERT_GT(said[Relay::to_server], 150u);
  ASSERT_GT(said[Relay::to_dialler], 130u);
  int noticed = 0;
  for (const Relay::Way way : {Relay::to_server, Relay::to_dialler}) {
    for (const Harm harm : {Harm::change, Harm::drop, Harm::insert}) {
      // What is dropped is noticed when more comes, or at the deadline; so not every byte of it.
      const std::size_t step = harm == Harm::drop ? 13 : 1;
      for (std::size_t position = 0; position < said[way]; position += step) {
        const Relay relay(server.address(), harm_at(way, position, harm));
        try {
          const auto store = through(relay, Deadline::after(milliseconds(150)));
          EXPECT_EQ(store->get("there", Deadline::after(milliseconds(150))), "value");
          // A byte that was inserted behind the answer is met by the next one.
          EXPECT_TRUE(harm == Harm::insert) << "way " << way << ", byte " << position;
          EXPECT_THROW(store->get("there", Deadline::after(milliseconds(150))), Error);
        } catch (const Error&) {
          ++noticed;
        }
      }
    }
  }
  EXPECT_GT(noticed, 500);
  EXPECT_EQ(direct->num_keys(), 1);
  EXPECT_EQ(direct->get("there", Deadline::after(seconds(30))), "value");
}

TEST_F(RelayedStore, ARequestThatIsChangedIsNotDoneAndBothSidesSaySo) {
  // The handshake's bytes come first; the first byte of the request's body behind its record's header.
  testing::internal::CaptureStderr();
  std::atomic<bool> meddling{false};
  const Relay relay(server.address(), [&](Relay::Way way, std::size_t, std::string bytes) {
    if (way == Relay::to_server && meddling) bytes[kRecordHeaderBytes + 20] ^= 1;
    return bytes;
  });
  const auto store = through(relay, Deadline::after(seconds(30)));
  store->set("before", "1");
  meddling = true;
  try {
    store->set("key", "forged");
    ADD_FAILURE() << "accepted";
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), HasSubstr("not authentic"));
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("not authentic"));
  EXPECT_THROW(store->set("key", "again"), Error) << "the connection is of no more use";
  EXPECT_EQ(direct->num_keys(), 2) << "no key was added";
}

TEST_F(RelayedStore, AnAnswerThatIsChangedIsNotBelieved) {
  std::atomic<bool> meddling{false};
  const Relay relay(server.address(), [&](Relay::Way way, std::size_t, std::string bytes) {
    if (way == Relay::to_dialler && meddling) bytes.back() ^= 1;
    return bytes;
  });
  const auto store = through(relay, Deadline::after(seconds(30)));
  meddling = true;
  try {
    store->get("there", Deadline::after(seconds(30)));
    ADD_FAILURE() << "believed";
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), HasSubstr("not authentic"));
  }
  EXPECT_THROW(store->get("there", Deadline::after(seconds(30))), ProtocolError) << "the connection is of no more use";
}

TEST_F(RelayedStore, ARequestThatIsRepeatedIsDoneOnce) {
  std::atomic<bool> meddling{false};
  const Relay relay(server.address(), [&](Relay::Way way, std::size_t, const std::string& bytes) {
    return way == Relay::to_server && meddling ? bytes + bytes : bytes;
  });
  const auto store = through(relay, Deadline::after(seconds(30)));
  meddling = true;
  try {
    EXPECT_EQ(store->add("count", 1), 1);
  } catch (const Error&) {
    // The server has closed the connection over the repetition before the reply was read.
  }
  EXPECT_THROW(store->add("count", 1), Error);
  EXPECT_EQ(direct->add("count", 0), 1);
}

TEST_F(RelayedStore, RequestsThatAreLeftOutExchangedOrReflectedAreNotDone) {
  // Keeps one request back, and then sends the next one alone, or before it; or sends the server its own answers.
  enum class Trick { leave_out, exchange, reflect };
  for (const Trick trick : {Trick::leave_out, Trick::exchange, Trick::reflect}) {
    std::atomic<bool> meddling{false};
    std::string kept;
    const Relay relay(server.address(), [&](Relay::Way way, std::size_t, std::string bytes) -> std::string {
      if (!meddling) return bytes;
      if (way == Relay::to_dialler) {
        kept = bytes;
        return bytes;
      }
      if (trick == Trick::reflect) return kept.empty() ? bytes : kept;
      if (kept.empty()) return kept = bytes, "";
      return trick == Trick::leave_out ? bytes : bytes + kept;
    });
    const auto store = through(relay, Deadline::after(seconds(30)));
    meddling = true;
    const std::vector<std::string> keys = {"missing"};
    EXPECT_THROW(store->wait(keys, Deadline::after(milliseconds(300))), Error);
    EXPECT_THROW(store->add("count", 1), Error);
    EXPECT_EQ(direct->num_keys(), 1);
  }
}

// ---- Where a connection leads ------------------------------------------------------------------------------------

TEST(RelayedRank, ADialThatIsLedToAnotherRankIsRefused) {
  auto loop = std::make_shared<EventLoop>("test");
  std::atomic<int> accepted{0};
  const Acceptor::Owner owner{.refusal = {},
                              .accept = [&](SecureConnection, const Hello&, const Address&) { ++accepted; }};
  const Acceptor third(loop, listen_on(Address::parse("127.0.0.1:0")), identity_of(3), owner);
  const Relay relay(third.address(), Relay::honest);
  const Hello hello{.role = Role::data, .rank = 1, .topic = "world/0:c", .to = 2};
  try {
    dial(relay.address(), identity_of(1), hello, Deadline::after(seconds(30)));
    ADD_FAILURE() << "accepted";
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), HasSubstr("this is rank 3, not rank 2"));
  }
  loop->post_and_wait([] {});
  EXPECT_EQ(accepted, 0);
}

// ---- Recordings --------------------------------------------------------------------------------------------------

/// A connection of an acceptor's, and all that went over its path.
struct Recorded {
  std::string said[2];  // by Relay::Way
  bool opened = false;  // the recording, with the secret
};

/// Sends one record over a recorded connection. Then opens the recording with the secret, as its finder would.
Recorded record_and_open(bool ephemeral) {
  const Identity identity = identity_of(2);
  Recorded recorded;
  std::mutex mutex;
  auto loop = std::make_shared<EventLoop>("test");
  std::optional<SecureConnection> accepted;
  const Acceptor acceptor(loop, listen_on(Address::parse("127.0.0.1:0")), identity,
                          {.refusal = {}, .accept = [&](SecureConnection connection, const Hello&, const Address&) {
                             accepted = std::move(connection);
                           }});
  const Relay relay(acceptor.address(), [&](Relay::Way way, std::size_t, std::string bytes) {
    const std::lock_guard lock(mutex);
    recorded.said[way] += bytes;
    return bytes;
  });
  const Hello hello{.role = Role::control, .rank = 1, .topic = "x", .to = 2, .ephemeral = ephemeral};
  const SecureConnection connection = dial(relay.address(), identity_of(1), hello, Deadline::after(seconds(30)));
  loop->post_and_wait([] {});
  EXPECT_EQ(accepted->keys.value().receive, connection.keys.value().send);
  EXPECT_EQ(accepted->keys->send, connection.keys->receive);

  const std::lock_guard lock(mutex);
  std::string_view said = recorded.said[Relay::to_server];
  const WireHeader header = decode_header(said.substr(0, kHeaderBytes));
  const std::string_view hello_bytes = said.substr(0, kHeaderBytes + header.length);
  const WireHello wire = decode_hello(hello_bytes.substr(kHeaderBytes));
  EXPECT_EQ(wire.ephemeral, ephemeral);
  const std::string_view challenge = std::string_view(recorded.said[Relay::to_dialler]).substr(0, kChallengeBytes);
  const Cipher cipher = decode_challenge(challenge.substr(kHeaderBytes)).cipher;
  const auto keys =
      keys_of(identity.secret, true, wire, cipher, hello_bytes, challenge.substr(0, kChallengeBytes - kMacBytes));
  recorded.opened = keys.value().send == connection.keys->send;
  return recorded;
}

TEST(Recording, IsNotOpenedByTheSecretAfterAKeyExchange) {
  EXPECT_TRUE(record_and_open(false).opened) << "this test does not open what it could";
  EXPECT_FALSE(record_and_open(true).opened);
}

// Whoever exchanges a share for one of his own, or says that there is no exchange, is noticed: the proofs cover both.
TEST(RelayedExchange, EveryChangedByteOfTheHandshakeIsNoticed) {
  const Recorded honest = record_and_open(true);
  const Identity identity = identity_of(2);
  auto loop = std::make_shared<EventLoop>("test");
  std::atomic<int> accepted{0};
  const Acceptor acceptor(
      loop, listen_on(Address::parse("127.0.0.1:0")), identity,
      {.refusal = {}, .accept = [&](SecureConnection, const Hello&, const Address&) { ++accepted; }});
  const Hello hello{.role = Role::control, .rank = 1, .topic = "x", .to = 2, .ephemeral = true};
  for (const Relay::Way way : {Relay::to_server, Relay::to_dialler}) {
    ASSERT_GT(honest.said[way].size(), 100u);
    for (std::size_t position = 0; position < honest.said[way].size(); ++position) {
      const Relay relay(acceptor.address(), harm_at(way, position, Harm::change));
      EXPECT_THROW(dial(relay.address(), identity_of(1), hello, Deadline::after(milliseconds(100))), Error)
          << "way " << way << ", byte " << position;
      if (way == Relay::to_server) {
        EXPECT_EQ(accepted, 0) << "byte " << position;
      }
    }
  }
}

// ---- Launchers ---------------------------------------------------------------------------------------------------

/// A coordinator that sends one message to a node, over a relay, until the node has it or either has given the other
/// up.
struct Order {
  std::vector<launch::AgentMessage> received;
  std::string lost_by_node;
  std::string lost_by_coordinator;
};

Order give_order(const launch::AgentMessage& order, const Relay::Tamper& meddle) {
  using namespace launch;
  Poller poller;
  Order outcome;
  const Secret secret = identity_of(0).secret;
  std::unique_ptr<AgentLink> coordinator;
  std::unique_ptr<AgentLink> node;
  // Often, as a length that was made larger is noticed when more bytes come.
  const AgentLink::Options options{.heartbeat = {.interval = milliseconds(10), .silence_limit = seconds(20)}};
  LauncherListener listener(
      poller, listen_on(Address::parse("127.0.0.1:0")), launcher_identity(secret), [&](SecureConnection connection) {
        coordinator = std::make_unique<AgentLink>(
            poller, std::move(connection), options,
            AgentLink::Events{.received = [](const AgentMessage&) {},
                              .lost = [&](const std::string& why) { outcome.lost_by_coordinator = why; }});
        coordinator->send(order);
      });
  const Relay relay(listener.address(), meddle);
  bool late = false;
  Poller::Timer limit = poller.call_after(seconds(30), [&] { late = true; });
  try {
    node = std::make_unique<AgentLink>(
        poller,
        dial_master({.host = "127.0.0.1", .port = relay.address().port()}, secret, Deadline::after(seconds(30)), -1,
                    [](const std::string&) {}),
        options,
        AgentLink::Events{.received = [&](const AgentMessage& message) { outcome.received.push_back(message); },
                          .lost = [&](const std::string& why) { outcome.lost_by_node = why; }});
  } catch (const Error& error) {
    outcome.lost_by_node = error.what();
    return outcome;
  }
  while (!late && outcome.received.empty() && outcome.lost_by_node.empty() && outcome.lost_by_coordinator.empty())
    poller.turn();
  EXPECT_FALSE(late) << "neither the message nor the loss";
  poller.cancel(limit);
  return outcome;
}

TEST(RelayedLauncher, AnOrderThatIsChangedIsNotExecuted) {
  launch::message::Job job{.name = "training"};
  job.options.command = {"/usr/bin/train", "--steps", "1000"};
  const launch::AgentMessage order = job;
  std::atomic<std::size_t> said{0};
  const Order honest = give_order(order, [&](Relay::Way way, std::size_t offset, std::string bytes) {
    if (way == Relay::to_dialler) said = offset + bytes.size();
    return bytes;
  });
  ASSERT_EQ(honest.received.size(), 1u);
  EXPECT_EQ(honest.received[0], order);
  const std::size_t handshake = kChallengeBytes + kVerdictHeaderBytes + kMacBytes;
  ASSERT_GT(said, handshake + 100);
  for (std::size_t position = handshake; position < said; ++position) {
    const Order harmed = give_order(order, harm_at(Relay::to_dialler, position, Harm::change));
    EXPECT_TRUE(harmed.received.empty() || harmed.received == std::vector{order}) << "byte " << position;
    if (harmed.received.empty()) {
      EXPECT_THAT(harmed.lost_by_node + harmed.lost_by_coordinator, HasSubstr("authentic")) << position;
    }
  }
}

}  // namespace
}  // namespace maniple
