#include "comm/net/address.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

template <class E, class F>
std::string message_of(F&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing of the expected type was thrown";
  return {};
}

TEST(Address, ParsesAndPrintsTheSameText) {
  for (const char* text : {"10.0.0.1:80", "127.0.0.1:0", "[::1]:8080", "unix:@some/name"}) {
    EXPECT_EQ(Address::parse(text).to_string(), text);
  }
  EXPECT_EQ(Address::parse("10.0.0.1:80").port(), 80);
  EXPECT_EQ(Address::parse("[::1]:80").host(), "::1");
}

TEST(Address, RefusesWhatIsNoAddress) {
  for (const char* text :
       {"", "localhost:80", "10.0.0.1", "10.0.0.1:", "10.0.0.1:70000", "10.0.0.1:8x", "::1:80", ":80", "unix:@"}) {
    EXPECT_THROW(Address::parse(text), InvalidArgument) << text;
  }
  EXPECT_THROW(Address::unix_abstract(std::string(200, 'x')), InvalidArgument);
}

TEST(Address, KnowsLoopbackAndWildcard) {
  EXPECT_TRUE(Address::parse("127.3.2.1:1").is_loopback());
  EXPECT_TRUE(Address::parse("[::1]:1").is_loopback());
  EXPECT_FALSE(Address::parse("10.0.0.1:1").is_loopback());
  EXPECT_TRUE(Address::parse("0.0.0.0:1").is_wildcard());
  EXPECT_TRUE(Address::parse("[::]:1").is_wildcard());
  EXPECT_FALSE(Address::parse("127.0.0.1:1").is_wildcard());
}

TEST(Address, ResolvesLiteralsAndLocalhost) {
  EXPECT_EQ(Address::resolve("127.0.0.1", 5, Deadline::never()).at(0).to_string(), "127.0.0.1:5");
  for (const Address& address : Address::resolve("localhost", 7, Deadline::after(seconds(20)))) {
    EXPECT_TRUE(address.is_loopback());
    EXPECT_EQ(address.port(), 7);
  }
}

TEST(Address, NamesTheHostThatCannotBeResolved) {
  try {
    Address::resolve("no-such-host.invalid", 1, Deadline::after(seconds(20)));
    FAIL() << "resolved";
  } catch (const Error& error) {
    EXPECT_TRUE(error.kind() == ErrorKind::system || error.kind() == ErrorKind::timeout);
    EXPECT_THAT(error.what(), HasSubstr("no-such-host.invalid"));
  }
}

TEST(Address, InterfaceByName) {
  EXPECT_TRUE(Address::of_interface("lo").is_loopback());
  const std::string text = message_of<InvalidArgument>([] { Address::of_interface("nope7"); });
  EXPECT_THAT(text, HasSubstr("nope7"));
  EXPECT_THAT(text, HasSubstr("lo"));
}

TEST(Address, RouteToLoopbackIsLoopback) {
  const Address local = route_to(Address::parse("127.0.0.1:4000"));
  EXPECT_EQ(local.to_string(), "127.0.0.1:0");
}

TEST(Listen, TakenPortNamesAddressAndHolder) {
  const UniqueFd first = listen_on(Address::parse("127.0.0.1:0"));
  const Address taken = Address::of_socket(first.get());
  const std::string text = message_of<SystemError>([&] { listen_on(taken); });
  EXPECT_THAT(text, HasSubstr(taken.to_string()));
  EXPECT_THAT(text, HasSubstr("pid " + std::to_string(::getpid())));
}

TEST(Listen, ForeignAddressIsNamed) {
  EXPECT_THAT(message_of<SystemError>([] { listen_on(Address::parse("192.0.2.1:0")); }),
              HasSubstr("not an address of this host"));
}

TEST(Connect, RefusedWithoutRetry) {
  UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  const Address address = Address::of_socket(listener.get());
  listener.reset();
  const std::string text = message_of<SystemError>([&] { connect_to(address, Deadline::after(seconds(5))); });
  EXPECT_THAT(text, HasSubstr(address.to_string()));
}

TEST(Connect, RetryEndsAtTheDeadlineWithTheReason) {
  UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  const Address address = Address::of_socket(listener.get());
  listener.reset();
  const auto start = Deadline::Clock::now();
  const std::string text = message_of<Timeout>([&] { connect_to(address, Deadline::after(milliseconds(200)), true); });
  EXPECT_THAT(text, HasSubstr("refused"));
  EXPECT_LT(Deadline::Clock::now() - start, seconds(3));
}

TEST(Connect, RetryEndsWhenItIsCancelled) {
  UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  const Address address = Address::of_socket(listener.get());
  listener.reset();
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd cancel(ends[0]), other(ends[1]);
  ASSERT_EQ(::write(other.get(), "x", 1), 1);
  EXPECT_THROW(connect_to(address, Deadline::after(seconds(30)), true, cancel.get()), Aborted);
}

TEST(Connect, RetryFindsAServerThatComesLate) {
  UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  const Address address = Address::of_socket(listener.get());
  listener.reset();
  std::thread late([&] { listener = listen_on(address); });
  const UniqueFd fd = connect_to(address, Deadline::after(seconds(20)), true);
  late.join();
  EXPECT_EQ(Address::of_peer(fd.get()).to_string(), address.to_string());
}

TEST(Connect, UnixAbstract) {
  const Address name = Address::unix_abstract("maniple-test-" + std::to_string(::getpid()));
  const UniqueFd listener = listen_on(name);
  const UniqueFd fd = connect_to(name, Deadline::after(seconds(5)));
  EXPECT_EQ(Address::of_peer(fd.get()).to_string(), name.to_string());
  EXPECT_THROW(connect_to(Address::unix_abstract("maniple-nobody"), Deadline::after(seconds(5))), SystemError);
}

TEST(Connect, DescriptorsAreCloseOnExecAndNonBlocking) {
  const UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  const UniqueFd fd = connect_to(Address::of_socket(listener.get()), Deadline::after(seconds(5)));
  for (const int each : {listener.get(), fd.get()}) {
    EXPECT_NE(::fcntl(each, F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_NE(::fcntl(each, F_GETFL) & O_NONBLOCK, 0);
  }
}

constexpr std::string_view kTable =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0000 100 0 0 10 "
    "0\n"
    "   1: 0100007F:733C 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4343 1 0000 100 0 0 10 "
    "0\n"
    "   2: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4444 1 0000 100 0 0 10 "
    "0\n";

TEST(PortReservation, FindsListenersOfThePortOnly) {
  EXPECT_EQ(listening_inodes(kTable, 29500), (std::vector<std::uint64_t>{4242}));
  EXPECT_EQ(listening_inodes(kTable, 22), (std::vector<std::uint64_t>{4444}));
  EXPECT_TRUE(listening_inodes(kTable, 80).empty());
  EXPECT_TRUE(listening_inodes("nonsense\n\n", 80).empty());
}

/// With this limit not one more descriptor can be opened.
rlim_t lowest_free() {
  const int fd = ::dup(STDERR_FILENO);
  ::close(fd);
  return static_cast<rlim_t>(fd);
}

// Linux before 6.15 has no limit.
TEST(Retransmission, IsAtLeastEveryHalfHeartbeat) {
  constexpr int kTcpRtoMaxMs = 44;
  const auto limit = [](std::optional<double> heartbeat_s) {
    const UniqueFd fd = open_stream_socket(AF_INET, "test");
    if (heartbeat_s) retransmit_often(fd.get(), *heartbeat_s);
    int ms = -1;
    socklen_t length = sizeof ms;
    ::getsockopt(fd.get(), IPPROTO_TCP, kTcpRtoMaxMs, &ms, &length);
    return ms;
  };
  const int usual = limit(std::nullopt);
  EXPECT_EQ(limit(0), usual);
  if (usual == -1) return;
  constexpr int kTick = 20;  // the kernel counts in ticks
  EXPECT_NEAR(limit(0.1), 1000, kTick);
  EXPECT_NEAR(limit(2.5), 1250, kTick);
  EXPECT_NEAR(limit(60), 30000, kTick);
  EXPECT_NEAR(limit(1000), 120000, kTick);
}

// With bbr the kernel ignores the option for thin streams.
TEST(Retransmission, IsSteadyWhateverTheCongestionControl) {
  const UniqueFd fd = open_stream_socket(AF_INET, "test");
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_CONGESTION, "bbr", 3);  // fails where the kernel lacks it
  retransmit_steadily(fd.get());
  int thin = 0;
  socklen_t length = sizeof thin;
  ASSERT_EQ(::getsockopt(fd.get(), IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &thin, &length), 0);
  EXPECT_EQ(thin, 1);
  char name[16] = {};
  length = sizeof name;
  ASSERT_EQ(::getsockopt(fd.get(), IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
  EXPECT_THAT(name, testing::AnyOf(testing::StrEq("cubic"), testing::StrEq("reno")));
}

class DescriptorLimit : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0); }
  void TearDown() override { ::setrlimit(RLIMIT_NOFILE, &before_); }
  rlimit before_{};
};

TEST_F(DescriptorLimit, IsRaisedToTheHardOne) {
  rlimit low = before_;
  low.rlim_cur = 64;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  raise_descriptor_limit();
  EXPECT_EQ(descriptor_use().limit, before_.rlim_max);
}

TEST_F(DescriptorLimit, SocketsRaiseItByThemselves) {
  rlimit low = before_;
  low.rlim_cur = lowest_free();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_TRUE(static_cast<bool>(listen_on(Address::parse("127.0.0.1:0"))));
}

TEST_F(DescriptorLimit, TheErrorStatesNeededAndThere) {
  EXPECT_EXIT(
      {
        rlimit low{};
        low.rlim_cur = low.rlim_max = lowest_free();
        ::setrlimit(RLIMIT_NOFILE, &low);
        try {
          listen_on(Address::parse("127.0.0.1:0"));
        } catch (const SystemError& error) {
          std::fputs(error.what(), stderr);
          ::_exit(7);
        }
        ::_exit(8);
      },
      testing::ExitedWithCode(7), "[0-9]+ file descriptors are open, 1 more needed, but the limit is [0-9]+");
}

}  // namespace

}  // namespace maniple
