// The authenticated handshake: a process needs the job's secret to join.
//
// Both ends prove that they hold the secret by an HMAC-SHA256 over the whole transcript: version, job, generation,
// role, both ranks, world size, topic and both nonces. The direction is part of the MAC, so neither replay nor
// reflection works. At most 512 bytes are read from an unauthenticated peer, the handshake takes at most 5 s, and MACs
// are compared in constant time.
//
// Relaying the handshake between two processes of the job gains an attacker nothing: the keys of the records that
// follow (secure_connection.h) are derived from the secret and the same transcript. Between hosts, the nonces are
// shares of an X25519 key exchange (key_exchange.h), and the keys also depend on its result: who records the traffic
// and learns the secret later cannot read it. Loopback and Unix sockets, which are not recorded, do without.
//
//   dialler (dial.cpp)                        acceptor (acceptor.cpp)
//   hello: fields, nonce              ->
//                                     <-      challenge: status, nonce, mac "acceptor", which the dialler checks
//   proof: mac "dialler"              ->      which the acceptor checks
//                                     <-      verdict: welcome, or a refusal with its reason; mac "verdict"
//
// handshake_wire.h defines the bytes of these four messages.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/base/unique_fd.h"
#include "comm/net/address.h"
#include "comm/net/event_loop.h"
#include "comm/net/secure_connection.h"

namespace maniple {

/// The job's secret. `none()` is a well-known value for jobs started by hand without a secret: it proves nothing, so
/// such jobs stay on loopback.
struct Secret {
  std::array<std::uint8_t, 32> bytes{};
  bool is_none() const noexcept { return bytes == std::array<std::uint8_t, 32>{}; }
  static Secret none() noexcept { return {}; }
  static Secret random();
};

/// What a connection is for.
enum class Role : std::uint8_t { store = 1, control = 2, data = 3, segment = 4 };

/// Identifies a process; the same for all of its connections.
struct Identity {
  Secret secret;
  std::string job = "default";   ///< at most 64 bytes
  std::uint32_t generation = 0;  ///< counts restarts; an older generation is rejected as superseded
  std::int32_t world_size = -1;  ///< -1: unknown (a launcher); otherwise both sides must agree
  std::int32_t rank = -1;        ///< -1: no rank (a launcher, a tool)
};

/// What the dialler requests.
struct Hello {
  Role role = Role::store;
  std::int32_t rank = -1;
  std::string topic;     ///< at most 128 bytes: group, use and number of a data connection, key of a segment, ...
  std::int32_t to = -1;  ///< the intended rank; any other rank refuses. -1: any listener
  bool encrypt = false;  ///< send data in records; store and control connections always do
  /// Exchange ephemeral keys on loopback, too (for tests). Records to other hosts always do.
  bool ephemeral = false;
};

/// Connects and authenticates. Throws Timeout, SystemError, or ProtocolError with the acceptor's reason ("superseded by
/// generation 4", "world size 8 here, 4 there"), and Aborted as soon as `cancel` (a descriptor; -1: none) is readable.
SecureConnection dial(const Address& address, const Identity& identity, const Hello& hello, Deadline deadline,
                      bool retry = false, int cancel = -1);

/// Limits on the cost of unauthenticated peers. Only tests use other values.
struct HandshakeLimits {
  std::size_t unauthenticated = 64;
  std::chrono::milliseconds handshake{5000};  ///< for the whole handshake
  /// The minimum time before a newer connection may displace a pending one. Without it, a thousand ranks that dial at
  /// the same moment on few cores would displace each other; the rest waits in the kernel's queue.
  std::chrono::milliseconds grace{50};
};

/// Listens and authenticates. Limits unauthenticated peers: at most 64 unauthenticated connections at a time (the
/// oldest is displaced first), 5 s each, and one rate-limited log line per reason with the peer's address.
class Acceptor {
 public:
  /// Both callbacks run in the loop's thread, one after the other, for an authentic, non-blocking connection.
  struct Owner {
    /// Returns the reason to refuse the connection, which is sent to the dialler; empty accepts it. Optional.
    std::function<std::string(const Hello& hello, const Address& peer)> refusal;
    /// Called once the dialler has the verdict: the connection may be used at once, from any thread.
    std::function<void(SecureConnection connection, const Hello& hello, const Address& peer)> accept;
  };

  Acceptor(std::shared_ptr<EventLoop> loop, UniqueFd listener, Identity identity, Owner owner,
           HandshakeLimits limits = {});
  ~Acceptor();

  const Address& address() const noexcept;
  std::uint64_t refused() const noexcept;  ///< connections refused so far

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace maniple
