// Where a socket is bound or connects to: IPv4, IPv6, or an abstract Unix name.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/base/unique_fd.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class Address {
 public:
  Address() = default;

  /// All addresses of a host name or literal, in the resolver's order. Throws SystemError naming the host and the
  /// reason, Timeout at the deadline (the lookup runs aside, so that a slow resolver cannot outlast it), Aborted as
  /// soon as `cancel` (a descriptor; -1: none) is readable.
  static std::vector<Address> resolve(const std::string& host, std::uint16_t port, Deadline deadline, int cancel = -1);
  /// A Unix socket in the abstract name space (no file, gone with its owner).
  static Address unix_abstract(std::string_view name);
  static Address of_socket(int fd);  ///< getsockname
  static Address of_peer(int fd);    ///< getpeername
  /// "10.0.0.1:80", "[::1]:80", "unix:@name"
  static Address parse(std::string_view text);
  static Address from_raw(const sockaddr* address, socklen_t length);
  /// The first address of a network interface; throws InvalidArgument listing the interfaces there are.
  static Address of_interface(const std::string& name);

  int family() const noexcept { return storage_.ss_family; }
  bool is_unix() const noexcept { return family() == AF_UNIX; }
  bool is_loopback() const noexcept;
  bool is_wildcard() const noexcept;  ///< 0.0.0.0 or ::
  std::uint16_t port() const noexcept;
  Address with_port(std::uint16_t port) const;
  std::string host() const;  ///< without the port
  std::string to_string() const;

  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const noexcept { return length_; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

/// A listening socket, close-on-exec and non-blocking. SystemError names the address; for a port in use also the pid of
/// the holder, when it is ours to see.
UniqueFd listen_on(const Address& address);

/// A connected socket, close-on-exec and non-blocking, TCP_NODELAY set. Retries refused connections until the deadline
/// when `retry` is set (the server may not be up yet). Throws Timeout or SystemError naming the address and the reason.
/// Throws Aborted as soon as `cancel` (a descriptor; -1: none) is readable.
UniqueFd connect_to(const Address& address, Deadline deadline, bool retry = false, int cancel = -1);

/// Whether a connect that failed with this errno may succeed later: no route, no answer, a listener that is overrun.
/// Not a refusal.
bool network_may_recover(int code) noexcept;

/// Keep-alive and user timeout, so that a vanished host is noticed within about `seconds`. Only where the other side
/// always reads: one that reads nothing for so long is taken for vanished, too.
void set_keepalive(int fd, double seconds);

/// For connections between ranks, whose heartbeats decide who is lost. A receiver may be late for as long as it likes.
/// Behind the heartbeats, a host that answers nothing at all is noticed after about four of these times (two hosts that
/// cannot reach each other, though both reach the leader); 0: not before the kernel itself gives up on data that nobody
/// acknowledges, after about 15 minutes (net.ipv4.tcp_retries2).
void set_liveness(int fd, double heartbeat_s);
/// For a connection of few and small messages: a packet that is lost again and again is sent again at even intervals,
/// and not ever more rarely. So a bad network delays messages by parts of a second and not by several.
void retransmit_steadily(int fd) noexcept;

/// How long ago anything was last heard from the other host of this TCP connection, if bytes have been sent since; that
/// is so for a moment whenever something is sent. Where it lasts, that host cannot be reached, or its answers cannot
/// reach this one; one that answers and does not read is heard.
std::optional<std::chrono::milliseconds> unanswered_for(int fd);

/// The local address that the kernel would use to reach `peer` (its route), without the port.
Address route_to(const Address& peer);

/// When descriptors run out the soft limit is raised once; if that does not help, SystemError says `purpose`, how many
/// there are and how many are allowed.
UniqueFd open_stream_socket(int family, const std::string& purpose);

// Who listens on a port: for the message that it is taken.

/// Inodes of the sockets that listen on `port`, from the text of /proc/net/tcp or tcp6.
std::vector<std::uint64_t> listening_inodes(std::string_view proc_net_tcp, std::uint16_t port);

/// The process that listens on the port, when this user may see it: "pid 4711 (python3)".
std::optional<std::string> describe_port_holder(std::uint16_t port);

}  // namespace maniple
