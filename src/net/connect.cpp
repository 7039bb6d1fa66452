#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <thread>

#include <fmt/format.h>

#include "base/system_error.h"
#include "net/address.h"
#include "net/descriptor_limit.h"
#include "net/open_socket.h"

namespace maniple {
namespace {

using std::chrono::milliseconds;

/// 0 when connected, otherwise the errno; ETIME when the deadline passed (ETIMEDOUT is the kernel's own), ECANCELED.
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

/// A loopback connect to a port of the ephemeral range nobody listens on can meet itself (a simultaneous open).
bool connected_to_itself(int fd) {
  const Address local = Address::of_socket(fd);
  Address peer;
  try {
    peer = Address::of_peer(fd);
  } catch (const SystemError&) {
    return false;  // gone already; the next read says why
  }
  return !local.is_unix() && local.port() == peer.port() && local.host() == peer.host();
}

bool may_pass(int code) {
  return code == ECONNREFUSED || code == ECONNRESET || code == ECONNABORTED || code == ETIMEDOUT ||
         code == EHOSTUNREACH || code == ENETUNREACH || code == ENETDOWN || code == EHOSTDOWN;
}

}  // namespace

UniqueFd open_stream_socket(int family, const std::string& purpose) {
  for (bool raised = false;; raised = true) {
    UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd) return fd;
    if (errno == EMFILE && !raised && raise_descriptor_limit()) continue;
    const int code = errno;
    if (code == EMFILE) throw SystemError(fmt::format("{}: {}", purpose, descriptor_shortage()), code);
    throw_system_error(purpose, code);
  }
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
      throw Timeout(fmt::format("{}: no answer within {:.1f} s{}", purpose, seconds(),
                                code == 0 ? std::string() : fmt::format("; before that: {}", errno_text(code))));
    }
    code = result == 0 ? ECONNREFUSED : result;
    // A Unix listener with a full backlog says EAGAIN: that is a wait, not a refusal.
    if (code != EAGAIN && !(retry && may_pass(code))) throw_system_error(purpose, code);
    fd.reset();
    if (deadline.remaining() <= pause) {
      throw Timeout(fmt::format("{}: not reachable within {:.1f} s: {}", purpose, seconds(), errno_text(code)));
    }
    std::this_thread::sleep_for(pause);  // sleep: until the next try: nobody can tell us when a port opens
    pause = std::min(pause * 2, milliseconds(100));
  }
}

void set_keepalive(int fd, double seconds) {
  if (Address::of_socket(fd).is_unix()) return;
  const int on = 1;
  const int idle = std::max(1, static_cast<int>(std::ceil(seconds / 2)));
  const int interval = std::max(1, static_cast<int>(std::ceil(seconds / 6)));
  const int probes = 3;
  const auto limit_ms = static_cast<unsigned>(std::max(1.0, seconds * 1000));
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof(limit_ms));
}

Address route_to(const Address& peer) {
  if (peer.is_unix()) return peer;
  // Connecting a datagram socket sends nothing; it only makes the kernel choose the route.
  constexpr std::uint16_t kDiscardPort = 9;
  UniqueFd fd(::socket(peer.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd) throw_system_error(fmt::format("route to {}", peer.host()));
  const Address target = peer.with_port(kDiscardPort);
  if (::connect(fd.get(), target.get(), target.length()) != 0)
    throw_system_error(fmt::format("route to {}", peer.host()));
  return Address::of_socket(fd.get()).with_port(0);
}

}  // namespace maniple
