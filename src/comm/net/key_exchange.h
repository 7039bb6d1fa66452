// An ephemeral X25519 key exchange, which gives the records of a connection forward secrecy.
//
//   KeyExchange mine;
//   send(mine.share());
//   const SharedKey key = mine.derive(receive());      // the same on both sides
//
// The shares do not authenticate anyone: the handshake's MACs cover them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace maniple {

using KeyShare = std::array<std::uint8_t, 32>;   ///< a public key, fresh and random
using SharedKey = std::array<std::uint8_t, 32>;  ///< known to the two sides only

/// One side's key pair. Made for one handshake and forgotten after it.
class KeyExchange {
 public:
  /// Throws Unsupported unless available().
  KeyExchange();
  ~KeyExchange();
  KeyExchange(KeyExchange&&) noexcept;
  KeyExchange& operator=(KeyExchange&&) noexcept;

  /// Whether this system's OpenSSL has X25519. Asks it once.
  static bool available();

  const KeyShare& share() const noexcept { return share_; }

  /// Throws ProtocolError if `theirs` is one of the few shares that would make the key predictable.
  SharedKey derive(const KeyShare& theirs) const;

 private:
  struct Pair;
  std::unique_ptr<Pair> pair_;
  KeyShare share_{};
};

}  // namespace maniple
