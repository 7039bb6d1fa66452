#include "comm/store/tcp_store.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <future>
#include <thread>

#include "comm/store/key_table.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

class TcpStore : public testing::Test {
 protected:
  TcpStore() {
    identity.secret = Secret::random();
    identity.world_size = 4;
    identity.rank = 0;
    server = std::make_shared<TcpStoreServer>(Address::parse("127.0.0.1:0"), identity);
  }
  std::shared_ptr<Store> connect(const std::string& host = "127.0.0.1", std::shared_ptr<void> keep = nullptr) const {
    return connect_tcp_store(host, server->address().port(), identity, Deadline::after(seconds(20)), std::move(keep));
  }
  Identity identity;
  std::shared_ptr<TcpStoreServer> server;
};

TEST_F(TcpStore, DescribesItself) { EXPECT_EQ(connect()->describe(), "tcp store at " + server->address().to_string()); }

TEST_F(TcpStore, ANameWithSeveralAddressesWorks) {
  const auto store = connect("localhost");
  store->set("k", "v");
  EXPECT_EQ(store->get("k", Deadline::after(seconds(5))), "v");
}

TEST_F(TcpStore, ClientsWaitForAServerThatComesLate) {
  const Address address = server->address();
  server.reset();
  auto early = std::async(std::launch::async, [&] {
    return connect_tcp_store("127.0.0.1", address.port(), identity, Deadline::after(seconds(20)));
  });
  server = std::make_shared<TcpStoreServer>(address, identity);
  early.get()->set("k", "v");
}

TEST_F(TcpStore, NoServerIsATimeoutThatNamesTheAddress) {
  const std::uint16_t port = server->address().port();
  server.reset();
  try {
    connect_tcp_store("127.0.0.1", port, identity, Deadline::after(milliseconds(100)));
    ADD_FAILURE() << "connected";
  } catch (const Timeout& error) {
    EXPECT_THAT(error.what(), HasSubstr("127.0.0.1:" + std::to_string(port)));
  }
}

TEST_F(TcpStore, TheEndOfTheServerWakesWaitersAtOnce) {
  const auto store = connect();
  auto waiting = std::async(std::launch::async, [&] { return store->get("never", Deadline::after(seconds(60))); });
  EXPECT_EQ(waiting.wait_for(milliseconds(20)), std::future_status::timeout);
  const auto start = Deadline::Clock::now();
  server.reset();
  try {
    waiting.get();
    ADD_FAILURE() << "got a value";
  } catch (const PeerLost& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0 or the launcher"));
  }
  EXPECT_LT(Deadline::Clock::now() - start, seconds(5));
  EXPECT_THROW(store->set("k", "v"), PeerLost);
  EXPECT_THROW(store->num_keys(), PeerLost);
}

TEST_F(TcpStore, KeepLivesAsLongAsTheClient) {
  std::weak_ptr<TcpStoreServer> watched = server;
  auto store = connect("127.0.0.1", server);
  server.reset();
  EXPECT_FALSE(watched.expired());
  store->set("k", "v");
  store.reset();
  EXPECT_TRUE(watched.expired());
}

TEST_F(TcpStore, ARetiredServerServesItsLastClients) {
  auto first = connect();
  auto second = connect();
  std::weak_ptr<TcpStoreServer> watched = server;
  TcpStoreServer::retire(std::move(server));
  first->set("k", "last value");
  first.reset();
  EXPECT_EQ(second->get("k", Deadline::after(seconds(5))), "last value");
  EXPECT_FALSE(watched.expired());
  second.reset();
  const Deadline deadline = Deadline::after(seconds(20));
  while (!watched.expired() && !deadline.expired()) std::this_thread::yield();
  EXPECT_TRUE(watched.expired());
}

TEST_F(TcpStore, ARetiredServerDropsAClientThatTakesNoReplies) {
  connect()->set("large", std::string(std::size_t{32} << 20, 'v'));  // far more than sockets take
  MessageStream silent(dial(server->address(), identity, {.role = Role::store, .rank = 1, .topic = "store"},
                            Deadline::after(seconds(20))),
                       kStoreReplies);
  const std::string body = encode_keys(std::vector<std::string>{"large"});
  silent.queue(encode_frame_header(1, static_cast<std::uint8_t>(StoreOp::multi_get), body.size()) + body);
  while (!silent.idle()) ASSERT_EQ(silent.flush(), 0);
  // The reply begins to arrive: it is under way when the server retires.
  pollfd arriving{.fd = silent.fd(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&arriving, 1, 20'000), 1);
  auto other = connect();
  std::weak_ptr<TcpStoreServer> watched = server;
  TcpStoreServer::retire(std::move(server), milliseconds(10));
  other->set("k", "still served");
  other.reset();
  const Deadline deadline = Deadline::after(seconds(20));
  while (!watched.expired() && !deadline.expired()) std::this_thread::yield();
  EXPECT_TRUE(watched.expired());
}

TEST_F(TcpStore, WhoeverIsAdmittedWhileTheServerIsLeavingIsServed) {
  for (int round = 0; round < 50; ++round) {
    auto host = std::make_shared<TcpStoreServer>(Address::resolve("127.0.0.1", 0, Deadline::after(seconds(20))).front(),
                                                 identity);
    const std::uint16_t port = host->address().port();
    auto last = connect_tcp_store("127.0.0.1", port, identity, Deadline::after(seconds(20)));
    TcpStoreServer::retire(std::move(host));
    auto leaving = std::async(std::launch::async, [&] { last.reset(); });
    std::shared_ptr<Store> late;
    try {
      late = connect_tcp_store("127.0.0.1", port, identity, Deadline::after(milliseconds(20)));
    } catch (const Error&) {
      // Gone before we came, or before we were admitted: that is an answer, too.
    }
    if (late) {
      EXPECT_NO_THROW(late->set("k", "v")) << "round " << round;
    }
    leaving.get();
  }
}

TEST_F(TcpStore, OtherRolesAreRefused) {
  EXPECT_THROW(
      dial(server->address(), identity, {.role = Role::data, .rank = 1, .topic = ""}, Deadline::after(seconds(20))),
      ProtocolError);
}

TEST_F(TcpStore, TheLargestValueManyReaders) {
  const auto store = connect();
  const std::string value(kMaxValueBytes, 'v');
  std::vector<std::future<std::size_t>> readers;
  for (int i = 0; i < 3; ++i) {
    readers.push_back(
        std::async(std::launch::async, [&] { return connect()->get("v", Deadline::after(seconds(60))).size(); }));
  }
  store->set("v", value);
  for (auto& reader : readers) EXPECT_EQ(reader.get(), kMaxValueBytes);
  // Longer together than an answer may be: an error to the caller, and nothing worse.
  EXPECT_THROW(store->multi_get(std::vector<std::string>(5, "v"), Deadline::after(seconds(20))), InvalidArgument);
  EXPECT_EQ(store->num_keys(), 1);
}

TEST_F(TcpStore, AWaitOfManyKeys) {
  const auto store = connect();
  std::vector<std::string> keys;
  for (int i = 0; i < 20'000; ++i) keys.push_back("key/" + std::to_string(i));
  auto waiting = std::async(std::launch::async, [&] { connect()->wait(keys, Deadline::after(seconds(60))); });
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) store->set(*key, "");
  waiting.get();
  EXPECT_EQ(store->num_keys(), 20'000);
}

// The server's process is stopped: the client's requests end at their limit, and not after minutes.
TEST(StoppedTcpStore, IsNoticedAtTheLimitOfRequests) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const TcpStoreServer server(Address::parse("127.0.0.1:0"), {});
    const std::uint16_t port = server.address().port();
    if (::write(ends[1], &port, sizeof port) != sizeof port) ::_exit(1);
    for (;;) ::pause();
  }
  ::close(ends[1]);
  std::uint16_t port = 0;
  ASSERT_EQ(::read(ends[0], &port, sizeof port), static_cast<ssize_t>(sizeof port));
  ::close(ends[0]);
  {
    const auto store = connect_tcp_store("127.0.0.1", port, {}, Deadline::after(std::chrono::seconds(60)));
    store->set("key", "value");
    EXPECT_EQ(::kill(child, SIGSTOP), 0);
    EXPECT_EQ(::waitpid(child, nullptr, WUNTRACED), child);
    store->limit_requests(Deadline::after(std::chrono::milliseconds(300)));
    const auto start = Deadline::Clock::now();
    EXPECT_THROW(store->set("key", "other"), Timeout);
    EXPECT_THROW(store->check(std::vector<std::string>{"key"}), Timeout);
    EXPECT_LT(Deadline::Clock::now() - start, std::chrono::seconds(30));
    EXPECT_EQ(::kill(child, SIGCONT), 0);
    store->limit_requests(Deadline::never());
    EXPECT_EQ(store->add("count", 1), 1);
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace maniple
