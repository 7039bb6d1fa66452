#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <string_view>

#include <fmt/format.h>

#include "comm/base/system_error.h"
#include "comm/net/address.h"

namespace maniple {
namespace {

using std::chrono::milliseconds;

/// Returns 0 when connected, otherwise an errno. ETIME: the deadline passed (ETIMEDOUT comes from the kernel).
/// ECANCELED: `cancel` is readable.
int try_connect(int fd, const Address& address, Deadline deadline, int cancel) {
  if (::connect(fd, address.get(), address.length()) == 0) return 0;
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  for (;;) {
    pollfd waiting[2] = {{.fd = fd, .events = POLLOUT, .revents = 0}, {.fd = cancel, .events = POLLIN, .revents = 0}};
    const int ready = ::poll(waiting, 2, deadline.poll_ms());
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) return errno;
    if (ready > 0 && waiting[0].revents == 0) return ECANCELED;
    if (ready > 0) break;
    if (deadline.expired()) return ETIME;
  }
  int code = 0;
  socklen_t length = sizeof(code);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &length) != 0) return errno;
  return code;
}

/// A loopback connect to an unused port in the ephemeral range can connect to itself (simultaneous open).
bool connected_to_itself(int fd) {
  const Address local = Address::of_socket(fd);
  Address peer;
  try {
    peer = Address::of_peer(fd);
  } catch (const SystemError&) {
    return false;  // already disconnected; the next read returns the reason
  }
  return !local.is_unix() && local.port() == peer.port() && local.host() == peer.host();
}

/// The kernel refuses these without a look at the routes: "fe80::1" lacks "%eth0".
bool lacks_interface(const Address& address) {
  if (address.family() != AF_INET6) return false;
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address.get());
  return IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr) && v6->sin6_scope_id == 0;
}

bool may_pass(const Address& address, int code) {
  if (code == ECONNREFUSED) return true;
  if (address.is_unix() || lacks_interface(address)) return false;
  return network_may_recover(code) || is_local_shortage(code);
}

std::string connect_error_text(const Address& address, int code) {
  std::string hint;
  if (lacks_interface(address)) {
    hint = "; a link-local address needs its interface, as in fe80::1%eth0";
  } else if (address.is_unix()) {
    // the system's text suffices
  } else if (code == EINVAL) {
    hint = "; a blackhole route leads there: see `ip route get`";
  } else if (code == EACCES) {
    hint = "; a prohibit route leads there, or a firewall rejects it: see `ip route get`";
  } else if (code == EADDRNOTAVAIL) {
    hint = "; this host has no free local port, or no address of its own to connect from";
  }
  return errno_text(code) + hint;
}

}  // namespace

bool network_may_recover(int code) noexcept {
  switch (code) {
    case ECONNRESET:
    case ECONNABORTED:
    case ETIMEDOUT:
    // What routes, interfaces and ICMP messages say. Linux returns EINVAL for a blackhole route, EACCES for a prohibit
    // route and for a firewall's rejection over IPv6, EAGAIN for a throw route over IPv6.
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENETDOWN:
    case ENETRESET:
    case EHOSTDOWN:
    case ENONET:
    case EINVAL:
    case EACCES:
    case EAGAIN:
    case ENOPROTOOPT:
    case EPROTO:
    case EOPNOTSUPP: return true;
    default: return false;
  }
}

bool is_local_shortage(int code) noexcept {
  return code == EMFILE || code == ENFILE || code == ENOMEM || code == ENOBUFS || code == EADDRNOTAVAIL;
}

UniqueFd open_stream_socket(int family, const std::string& purpose) {
  return new_descriptor(purpose, [&] { return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

UniqueFd connect_to(const Address& address, Deadline deadline, bool retry, int cancel) {
  const auto start = Deadline::Clock::now();
  const std::string purpose = fmt::format("connect to {}", address.to_string());
  const auto seconds = [&] { return std::chrono::duration<double>(Deadline::Clock::now() - start).count(); };
  milliseconds pause{1};
  int code = 0;
  for (;;) {
    UniqueFd fd = open_stream_socket(address.family(), purpose);
    const int result = try_connect(fd.get(), address, deadline, cancel);
    if (result == 0 && !connected_to_itself(fd.get())) {
      const int on = 1;
      if (!address.is_unix()) ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      return fd;
    }
    if (result == ECANCELED) throw Aborted(fmt::format("{}: given up after {:.1f} s", purpose, seconds()));
    if (result == ETIME) {
      throw Timeout(
          fmt::format("{}: no answer within {:.1f} s{}", purpose, seconds(),
                      code == 0 ? std::string() : fmt::format("; before that: {}", connect_error_text(address, code))),
          {}, seconds());
    }
    code = result == 0 ? ECONNREFUSED : result;
    // A Unix listener with a full backlog returns EAGAIN, which means wait, not refused.
    const bool backlog = code == EAGAIN && address.is_unix();
    if (!backlog && !(retry && may_pass(address, code)))
      throw SystemError(fmt::format("{}: {}", purpose, connect_error_text(address, code)), code);
    fd.reset();
    if (deadline.remaining() <= pause) {
      throw Timeout(
          fmt::format("{}: not reachable within {:.1f} s: {}", purpose, seconds(), connect_error_text(address, code)),
          {}, seconds());
    }
    pollfd wake{cancel, POLLIN, 0};  // there is no event for a port that opens
    if (::poll(&wake, 1, static_cast<int>(pause.count())) > 0)
      throw Aborted(fmt::format("{}: given up after {:.1f} s", purpose, seconds()));
    pause = std::min(pause * 2, milliseconds(100));
  }
}

namespace {

struct KeepAlive {
  int idle_s;
  int interval_s;
  int probes;
  unsigned user_timeout_ms;  // 0: system default
};

void set(int fd, const KeepAlive& options) {
  if (Address::of_socket(fd).is_unix()) return;
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &options.idle_s, sizeof(options.idle_s));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &options.interval_s, sizeof(options.interval_s));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &options.probes, sizeof(options.probes));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &options.user_timeout_ms, sizeof(options.user_timeout_ms));
}

/// net.ipv4.tcp_retries2; 0: unknown.
int retries_of_kernel() {
  int retries = 0;
  std::ifstream("/proc/sys/net/ipv4/tcp_retries2") >> retries;
  return retries;
}

int whole_seconds(double seconds) {
  constexpr double kMost = 32767;  // the kernel's maximum
  return static_cast<int>(std::ceil(std::clamp(seconds, 1.0, kMost)));
}

}  // namespace

void set_keepalive(int fd, double seconds) {
  const double most_ms = 2e9;  // the kernel stores an int: 23 days
  set(fd, {whole_seconds(seconds / 2), whole_seconds(seconds / 6), 3,
           static_cast<unsigned>(std::clamp(seconds * 1000, 1.0, most_ms))});
}

void set_liveness(int fd, double heartbeat_s) {
  // Does not set TCP_USER_TIMEOUT: with it the kernel also ends connections whose receiver acknowledges but does not
  // read.
  if (heartbeat_s <= 0) return set(fd, {.idle_s = 60, .interval_s = 60, .probes = 127, .user_timeout_ms = 0});
  const int beat = whole_seconds(heartbeat_s);
  set(fd, {.idle_s = std::min(beat, 60), .interval_s = beat, .probes = 3, .user_timeout_ms = 0});
}

void retransmit_often(int fd, double heartbeat_s) noexcept {
  // The kernel gives up after 15 intervals (net.ipv4.tcp_retries2): with half a heartbeat, that is still later than
  // four heartbeats. With fewer retries it could be earlier. Linux before 6.15 lacks the option, and Unix sockets do
  // not need it.
  static const bool kManyRetries = retries_of_kernel() >= 15;
  if (heartbeat_s <= 0 || !kManyRetries) return;
  constexpr int kTcpRtoMaxMs = 44;
  const auto limit_ms = static_cast<int>(std::clamp(heartbeat_s * 500, 1000.0, 120000.0));
  ::setsockopt(fd, IPPROTO_TCP, kTcpRtoMaxMs, &limit_ms, sizeof limit_ms);
}

void retransmit_steadily(int fd) noexcept {
  const int on = 1;
  // Fails on Unix sockets: they are lossless.
  if (::setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on) != 0) return;
  // With bbr, which has no slow-start threshold, the kernel takes every stream for one that has just begun, and backs
  // off exponentially despite the option.
  for (const std::string_view name : {"cubic", "reno"}) {
    if (::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0) break;
  }
  // The usual interval, at least 0.2 s, leaves few attempts within a heartbeat. Recent Linux allows less.
  constexpr int kTcpRtoMinUs = 45;
  const int interval_us = 50'000;
  ::setsockopt(fd, IPPROTO_TCP, kTcpRtoMinUs, &interval_us, sizeof interval_us);
}

std::optional<std::chrono::milliseconds> unanswered_for(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;  // not TCP
  // Both are ages. A retransmission counts as sending, and an acknowledgement of nothing new as hearing.
  if (info.tcpi_last_ack_recv <= info.tcpi_last_data_sent) return std::nullopt;
  return std::chrono::milliseconds(info.tcpi_last_ack_recv);
}

bool is_same_user(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         (credentials.uid == ::geteuid() || credentials.uid == 0);
}

Address route_to(const Address& peer) {
  if (peer.is_unix()) return peer;
  // Connecting a datagram socket does not send anything; the kernel only chooses the route.
  constexpr std::uint16_t kDiscardPort = 9;
  const UniqueFd fd = new_descriptor(fmt::format("route to {}", peer.host()),
                                     [&] { return ::socket(peer.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0); });
  const Address target = peer.with_port(kDiscardPort);
  if (::connect(fd.get(), target.get(), target.length()) != 0) {
    const int code = errno;
    throw SystemError(fmt::format("route to {}: {}", peer.host(), connect_error_text(peer, code)), code);
  }
  return Address::of_socket(fd.get()).with_port(0);
}

}  // namespace maniple
