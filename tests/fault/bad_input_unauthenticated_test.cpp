// Those who know nothing of us: scanners, web browsers, the silent and the slow, and too many of them.
#include <netinet/in.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/net/address.h"
#include "fault/bad_input.h"
#include <maniple/comm/options.h>

namespace maniple {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class BadUnauthenticatedPeer : public BadInput {};

TEST_P(BadUnauthenticatedPeer, N01N02ScansAreSilent) {
  const auto before = descriptor_use().open;
  const std::string log = logged([&] {
    for (int i = 0; i < 100; ++i) Raw client(target.address());
    for (int i = 0; i < 100; ++i) Raw(target.address()).reset_connection();
  });
  EXPECT_EQ(log, "");
  const Deadline deadline = soon();
  while (descriptor_use().open > before && !deadline.expired()) std::this_thread::yield();
  EXPECT_LE(descriptor_use().open, before);
}

TEST_P(BadUnauthenticatedPeer, N03N07SilentAndSlowPeersAreClosedInTime) {
  const auto start = Deadline::Clock::now();
  const std::string log = logged([&] {
    Raw silent(target.address());
    Raw slow(target.address());
    const std::string hello = encode_hello(target.hello());
    std::size_t sent = 0;
    const double pace = target.handshake_seconds() / 8;
    // A byte now and then: the limit is for the whole, so it does not help.
    while (sent < hello.size() && !slow.closed_by(Deadline::after(Seconds(pace)))) slow.send(hello.substr(sent++, 1));
    EXPECT_LT(sent, hello.size());
    EXPECT_TRUE(silent.closed_by(soon()));
  });
  EXPECT_GE(seconds_since(start), target.handshake_seconds() * 0.9);
  EXPECT_LT(seconds_since(start), target.handshake_seconds() + 30);
  EXPECT_THAT(log, HasSubstr("no handshake within"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

TEST_P(BadUnauthenticatedPeer, N04N05N06N09UnauthenticatedPeersAreNamedAndClosed) {
  std::string tls_hello("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
  tls_hello.append(500, 'r');
  const std::pair<std::string, const char*> clients[] = {
      {"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP client on training port"},
      {tls_hello, "TLS client"},
      {"SSH-2.0-OpenSSH_9.2\r\n", "SSH client"},
      {"*1\r\n$4\r\nPING\r\n", "Redis client"},
      {"\x93MNPX\r\n\x1a and more", "wrong magic"},
  };
  for (const auto& [bytes, expected] : clients) {
    std::uint16_t port = 0;
    const std::string log = logged([&] {
      Raw client(target.address());
      port = client.port();
      client.send(bytes);
      EXPECT_TRUE(client.closed_by(soon()));
    });
    EXPECT_THAT(log, AllOf(HasSubstr(expected), HasSubstr("127.0.0.1:" + std::to_string(port))));
  }
}

TEST_P(BadUnauthenticatedPeer, N04ManyUnauthenticatedPeersAreOneLine) {
  const std::string log = logged([&] {
    for (int i = 0; i < 50; ++i) {
      Raw client(target.address());
      client.send("GET / HTTP/1.1\r\n\r\n");
      EXPECT_TRUE(client.closed_by(soon()));
    }
  });
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

TEST_P(BadUnauthenticatedPeer, N28AFloodDoesNotReachTheMembers) {
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

INSTANTIATE_TEST_SUITE_P(All, BadUnauthenticatedPeer, kListeners, kListenerName);

}  // namespace
}  // namespace maniple
