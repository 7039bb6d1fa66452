// The authenticated handshake: no process joins without the job's secret.
//
// Both ends prove that they hold the secret by an HMAC-SHA256 over the whole transcript: version, job, generation,
// role, both ranks, world size, topic and both nonces, with the direction mixed in, so that neither replay nor
// reflection works. At most 512 bytes are read before a peer is authentic; the whole takes at most 5 s; comparison is
// in constant time.
//
// Whoever relays this between two processes of the job gains nothing: the keys of the records that follow
// (secure_connection.h) are derived from the secret and the same transcript.
//
//   dialler (dial.cpp)                        acceptor (acceptor.cpp)
//   hello: fields, nonce              ->
//                                     <-      challenge: status, nonce, mac "acceptor", which the dialler checks
//   proof: mac "dialler"              ->      which the acceptor checks
//                                     <-      verdict: welcome, or a refusal with its reason; mac "verdict"
//
// The bytes of these four messages are in handshake_wire.h.
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

/// The job's secret. `none()` is a well-known value for jobs started by hand without one: it proves nothing, which is
/// why such jobs stay on loopback.
struct Secret {
  std::array<std::uint8_t, 32> bytes{};
  bool is_none() const noexcept { return bytes == std::array<std::uint8_t, 32>{}; }
  static Secret none() noexcept { return {}; }
  static Secret random();
};

/// What a connection is for.
enum class Role : std::uint8_t { store = 1, control = 2, data = 3, segment = 4 };

/// Who a process is, the same for all of its connections.
struct Identity {
  Secret secret;
  std::string job = "default";   ///< at most 64 bytes
  std::uint32_t generation = 0;  ///< counts restarts; an older one is refused as superseded
  std::int32_t world_size = -1;  ///< -1: not known (a launcher); otherwise both sides must agree
  std::int32_t rank = -1;        ///< -1: no rank (a launcher, a tool)
};

/// What the dialler asks for.
struct Hello {
  Role role = Role::store;
  std::int32_t rank = -1;
  std::string topic;     ///< at most 128 bytes: group, use and number of a data connection, key of a segment, ...
  std::int32_t to = -1;  ///< the rank that is meant; another one refuses. -1: whoever listens there
  bool encrypt = false;  ///< data: in records. Store and control connections always are.
};

/// Connects and authenticates. Throws Timeout, SystemError, or ProtocolError with the acceptor's reason ("superseded by
/// generation 4", "world size 8 here, 4 there").
/// Throws Aborted as soon as `cancel` (a descriptor; -1: none) is readable.
SecureConnection dial(const Address& address, const Identity& identity, const Hello& hello, Deadline deadline,
                      bool retry = false, int cancel = -1);

/// What unauthenticated peers may cost an acceptor. Other values than these are for tests.
struct HandshakeLimits {
  std::size_t unauthenticated = 64;
  std::chrono::milliseconds handshake{5000};  ///< in all, not for each byte
  /// A pending connection is left at least this long before a newer one may displace it, so that a thousand ranks that
  /// dial in the same moment on few cores do not displace each other; the rest waits in the kernel's queue.
  std::chrono::milliseconds grace{50};
};

/// Listens and authenticates. Unauthenticated peers cost little: at most 64 unauthenticated connections at a time (the
/// oldest goes first), 5 s each, one rate-limited log line for each reason with the peer's address.
class Acceptor {
 public:
  /// Both run in the loop's thread, one after the other, for a connection that is authentic and non-blocking.
  struct Owner {
    /// The reason to refuse it after all, which is sent to the dialler; empty: it is welcome. May be left out.
    std::function<std::string(const Hello& hello, const Address& peer)> refusal;
    /// The dialler has the verdict, so the connection may be used at once, and from any thread.
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
