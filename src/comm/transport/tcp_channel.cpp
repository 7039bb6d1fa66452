#include "comm/transport/tcp_channel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/system_error.h"
#include "comm/net/address.h"

namespace maniple {
namespace {

void set_option(int fd, int level, int name, int value, const char* what) {
  if (::setsockopt(fd, level, name, &value, sizeof value) != 0) throw_system_error(what);
}

bool set_congestion(int fd, const std::string& name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

/// bbr paces packets by timers to keep queues along a path short. On a path with a round trip under 1 ms that only
/// costs processor time, an eighth of an all_reduce's, so such connections get cubic, Linux's default, or else reno,
/// which every Linux allows.
void leave_bbr_on_a_short_path(int fd) {
  constexpr std::uint32_t kShortUs = 1000;  // round-trip time
  char name[16] = {};
  socklen_t length = sizeof name;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length) != 0 || std::strncmp(name, "bbr", 3) != 0) return;
  tcp_info facts{};
  length = sizeof facts;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &length) != 0 || facts.tcpi_rtt == 0) return;
  if (facts.tcpi_rtt < kShortUs && !set_congestion(fd, "cubic")) set_congestion(fd, "reno");
}

void prepare(int fd, int buffer_option, const TcpChannelOptions& options) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) throw_system_error("fcntl O_NONBLOCK");
  if (options.buffer_kib > 0)
    set_option(fd, SOL_SOCKET, buffer_option, options.buffer_kib * 1024, "socket buffer size");

  int family = AF_UNSPEC;
  socklen_t length = sizeof family;
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length) != 0) throw_system_error("getsockopt SO_DOMAIN");
  if (family != AF_INET && family != AF_INET6) return;
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  if (options.congestion.empty()) {
    leave_bbr_on_a_short_path(fd);
  } else if (!set_congestion(fd, options.congestion)) {
    throw_system_error("TCP_CONGESTION");
  }
  set_liveness(fd, options.heartbeat_s);
  retransmit_often(fd, options.heartbeat_s);
}

bool would_block(int code) noexcept { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

class TcpSink final : public ByteSink {
 public:
  TcpSink(UniqueFd socket, bool checksum) noexcept : socket_(std::move(socket)), checksum_(checksum) {}

  std::size_t write_some(std::span<const iovec> parts) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());  // sendmsg only reads it
    message.msg_iovlen = parts.size();
    const ssize_t moved = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (moved >= 0) return moved;
    if (would_block(errno)) return 0;
    throw_system_error("send");
  }
  int fd() const noexcept override { return socket_.get(); }
  bool wants_checksums() const noexcept override { return checksum_; }

 private:
  UniqueFd socket_;
  bool checksum_;
};

class TcpSource final : public ByteSource {
 public:
  explicit TcpSource(UniqueFd socket) noexcept : socket_(std::move(socket)) {}

  std::size_t read_some(std::span<const iovec> parts) override {
    const ssize_t moved = ::readv(socket_.get(), parts.data(), static_cast<int>(parts.size()));
    if (moved > 0) return moved;
    if (moved == 0) throw SystemError("connection closed by the peer", ECONNRESET);
    if (would_block(errno)) return 0;
    throw_system_error("receive");
  }
  int fd() const noexcept override { return socket_.get(); }

 private:
  UniqueFd socket_;
};

}  // namespace

TcpChannelOptions tcp_channel_options() {
  TcpChannelOptions options;
  options.buffer_kib = static_cast<int>(knob_integer(Knob::tcp_buffer_kib));
  options.congestion = knob_text(Knob::tcp_congestion);
  options.heartbeat_s = knob_number(Knob::heartbeat_s);
  options.checksum = knob_flag(Knob::tcp_checksum);
  return options;
}

void require_congestion(const std::string& name) {
  const UniqueFd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!probe) throw_system_error("socket");
  MANIPLE_REQUIRE(set_congestion(probe.get(), name),
                  "this system does not have or allow that congestion control ({}); "
                  "/proc/sys/net/ipv4/tcp_allowed_congestion_control lists those that it allows",
                  std::strerror(errno));
}

std::unique_ptr<ByteSink> make_tcp_sink(UniqueFd socket, const TcpChannelOptions& options) {
  prepare(socket.get(), SO_SNDBUF, options);
  return std::make_unique<TcpSink>(std::move(socket), options.checksum);
}

std::unique_ptr<ByteSource> make_tcp_source(UniqueFd socket, const TcpChannelOptions& options) {
  prepare(socket.get(), SO_RCVBUF, options);
  return std::make_unique<TcpSource>(std::move(socket));
}

}  // namespace maniple
