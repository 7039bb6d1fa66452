#include "comm/transport/tcp_channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "comm/transport/frame_sender.h"
#include <maniple/comm/error.h>

namespace maniple::test {
namespace {

using ::testing::HasSubstr;

class Congestion : public ::testing::Test {
 protected:
  Congestion() { ::unsetenv("MANIPLE_TCP_CONGESTION"); }
  ~Congestion() override { ::unsetenv("MANIPLE_TCP_CONGESTION"); }

  static std::string in_use(int fd) {
    char name[32] = {};
    socklen_t length = sizeof name;
    EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
    return name;
  }
  static UniqueFd socket() { return UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }
};

TEST_F(Congestion, IsTheSystemsUnlessNamed) {
  const std::string usual = in_use(socket().get());
  EXPECT_EQ(in_use(make_tcp_sink(socket(), tcp_channel_options())->fd()), usual);
}

// Connected over loopback, whose round trip is far below a millisecond, unless the machine is very busy.
TEST_F(Congestion, IsNotBbrBetweenHostsAMomentApart) {
  const UniqueFd listener = socket();
  sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t length = sizeof address;
  auto* name = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(listener.get(), name, length), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), name, &length), 0);
  for (const std::string wished : {"bbr", "reno"}) {
    UniqueFd client = socket();
    if (::setsockopt(client.get(), IPPROTO_TCP, TCP_CONGESTION, wished.data(), static_cast<socklen_t>(wished.size())) !=
        0) {
      EXPECT_EQ(wished, "bbr") << std::strerror(errno);  // a kernel may lack it, and then nothing has to be avoided
      continue;
    }
    ASSERT_EQ(::connect(client.get(), name, length), 0);
    ASSERT_EQ(in_use(client.get()), wished);
    tcp_info facts{};
    socklen_t size = sizeof facts;
    ASSERT_EQ(::getsockopt(client.get(), IPPROTO_TCP, TCP_INFO, &facts, &size), 0);
    const auto sink = make_tcp_sink(std::move(client), tcp_channel_options());
    if (wished == "bbr" && facts.tcpi_rtt < 1000) {
      EXPECT_THAT(in_use(sink->fd()), ::testing::AnyOf("cubic", "reno"));
    } else {
      EXPECT_EQ(in_use(sink->fd()), wished);
    }
  }
}

TEST_F(Congestion, IsThatOfTheVariable) {
  ::setenv("MANIPLE_TCP_CONGESTION", "reno", 1);  // every Linux has it
  EXPECT_EQ(in_use(make_tcp_sink(socket(), tcp_channel_options())->fd()), "reno");
  EXPECT_EQ(in_use(make_tcp_source(socket(), tcp_channel_options())->fd()), "reno");
}

TEST_F(Congestion, ThatDoesNotExistIsNamedAtOnce) {
  require_congestion("reno");
  try {
    require_congestion("pigeon");
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("tcp_allowed_congestion_control"));
  }
}

int option(int fd, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, name, &value, &length), 0);
  return value;
}

/// Whether a frame that is sent with these options says that its payload has a checksum, and what the checksum is.
FrameHeader header_sent(const TcpChannelOptions& options) {
  int ends[2] = {};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd reader(ends[1]);
  FrameSender sender({1, 1}, 1, [&](int, Deadline) { return make_tcp_sink(UniqueFd(ends[0]), options); });
  const Signature signature{1, 2, 3, 4};
  const std::array<std::byte, 8> payload{std::byte{7}};
  Transfer transfer;
  transfer.signature = &signature;
  transfer.from = payload.data();
  transfer.size = payload.size();
  sender.post(transfer, Deadline::never());
  sender.advance();
  EXPECT_TRUE(transfer.done);
  std::array<std::byte, kMaxHeaderBytes> header{};
  EXPECT_EQ(::read(reader.get(), header.data(), header.size()), static_cast<ssize_t>(header.size()));
  return decode_frame_header(header.data());
}

TEST(Checksum, OfPayloadsIsSentUnlessTheVariableSaysNo) {
  EXPECT_TRUE(header_sent(tcp_channel_options()).checked);
  EXPECT_NE(header_sent(tcp_channel_options()).check, 0U);
  ::setenv("MANIPLE_TCP_CHECKSUM", "0", 1);
  const TcpChannelOptions without = tcp_channel_options();
  ::unsetenv("MANIPLE_TCP_CHECKSUM");
  EXPECT_FALSE(header_sent(without).checked);
  EXPECT_EQ(header_sent(without).check, 0U);
}

// With a user timeout the kernel ends connections whose receiver is merely late.
TEST(Liveness, IsNoShorterThanTheHeartbeatAllowsAndAReceiverMayBeLate) {
  int before = 0;
  for (const double heartbeat : {0.1, 2.5, 60.0, 3600.0, 1e6, 0.0}) {
    TcpChannelOptions options;
    options.heartbeat_s = heartbeat;
    const auto sink = make_tcp_sink(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), options);
    EXPECT_EQ(option(sink->fd(), TCP_USER_TIMEOUT), 0);
    const int silence =
        option(sink->fd(), TCP_KEEPIDLE) + option(sink->fd(), TCP_KEEPCNT) * option(sink->fd(), TCP_KEEPINTVL);
    EXPECT_GE(silence, std::min(3 * heartbeat, 90'000.0)) << heartbeat;
    if (heartbeat > 0) {
      EXPECT_GE(silence, before) << "a longer heartbeat must not tolerate less: " << heartbeat;
      before = silence;
    } else {
      EXPECT_GE(silence, 3600) << "0 means never";
    }
  }
}

}  // namespace
}  // namespace maniple::test
