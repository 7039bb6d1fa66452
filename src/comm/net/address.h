// Socket addresses (IPv4, IPv6 or an abstract Unix name), listening and connecting.
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

  /// All addresses of a host name or literal, in the resolver's order. Throws SystemError with the host and the reason,
  /// Timeout at the deadline (the lookup runs in a separate thread, so a slow resolver cannot delay the return), and
  /// Aborted as soon as `cancel` (a descriptor; -1: none) is readable.
  static std::vector<Address> resolve(const std::string& host, std::uint16_t port, Deadline deadline, int cancel = -1);
  /// A Unix socket in the abstract namespace (without a file; it disappears with its owner).
  static Address unix_abstract(std::string_view name);
  static Address of_socket(int fd);  ///< getsockname
  static Address of_peer(int fd);    ///< getpeername
  /// "10.0.0.1:80", "[::1]:80", "unix:@name"
  static Address parse(std::string_view text);
  static Address from_raw(const sockaddr* address, socklen_t length);
  /// The first address of a network interface. Throws InvalidArgument with a list of the available interfaces.
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

/// A listening socket, close-on-exec and non-blocking. SystemError contains the address; for a port in use also the
/// holder's pid, if this user may see it.
UniqueFd listen_on(const Address& address);

/// A connected socket, close-on-exec and non-blocking, with TCP_NODELAY. With `retry`, retries until the deadline while
/// the connection is refused, the network may recover, or this host lacks something. Throws Timeout or SystemError with
/// the address and the reason, and Aborted as soon as `cancel` (a descriptor; -1: none) is readable.
UniqueFd connect_to(const Address& address, Deadline deadline, bool retry = false, int cancel = -1);

/// Whether a connect to an IP address that failed with this errno may succeed later: no route (or one that discards),
/// no reply, a router or firewall that rejects, or an overloaded listener. False for a refused connection.
bool network_may_recover(int code) noexcept;
/// Whether this host lacks descriptors, memory, local ports or an address to connect from: the peer is not to blame.
bool is_local_shortage(int code) noexcept;

/// Sets keep-alive and user timeout, so that a vanished host is noticed within about `seconds`. Use it only if the peer
/// always reads: a peer that reads nothing for that long counts as vanished, too.
void set_keepalive(int fd, double seconds);

/// For connections between ranks, whose heartbeats decide which rank is lost. A receiver may lag without limit. As a
/// backstop, a host that does not reply at all is noticed after about four heartbeat intervals; this covers two hosts
/// that cannot reach each other although both reach the leader. 0: only when the kernel gives up on unacknowledged
/// data, after about 15 minutes (net.ipv4.tcp_retries2).
void set_liveness(int fd, double heartbeat_s);
/// For connections with data: retransmits at least every half heartbeat. Otherwise the interval doubles up to two
/// minutes, and on a link that loses many packets it soon exceeds the silence after which a host counts as lost.
void retransmit_often(int fd, double heartbeat_s) noexcept;
/// For a connection with few small messages: retransmits a repeatedly lost packet at even intervals instead of backing
/// off exponentially, so a bad network delays messages by fractions of a second instead of several seconds.
void retransmit_steadily(int fd) noexcept;

/// Time since anything was last heard from the other host of this TCP connection, if bytes have been sent since then;
/// nullopt otherwise. After every send this holds for a moment. If it lasts, this host cannot reach the other one, or
/// the replies do not get back. A host that acknowledges but does not read counts as heard.
std::optional<std::chrono::milliseconds> unanswered_for(int fd);

/// Whether the process at the other end of this Unix socket belongs to this process's user, or to root.
bool is_same_user(int fd);

/// The local address that the kernel would use to reach `peer` (its route), without the port.
Address route_to(const Address& peer);

/// A stream socket. When descriptors run out, raises the soft limit once; if that does not help, throws SystemError
/// with `purpose`, the number of open descriptors and the limit.
UniqueFd open_stream_socket(int family, const std::string& purpose);

// The process that listens on a port, for the error that the port is in use.

/// Inodes of the sockets that listen on `port`, from the text of /proc/net/tcp or tcp6.
std::vector<std::uint64_t> listening_inodes(std::string_view proc_net_tcp, std::uint16_t port);

/// The process that listens on the port, if this user may see it: "pid 4711 (python3)".
std::optional<std::string> describe_port_holder(std::uint16_t port);

}  // namespace maniple
