// The wire format of the handshake. Free of I/O, so that it can be tested and fuzzed alone.
//
//   header     magic[8] version:u16 length:u16            the same in all versions, so that they can refuse each other
//   hello      header, role:u8 cipher:u8 encrypt:u8 ephemeral:u8 generation:u32 world_size:i32 rank:i32 to:i32
//   nonce[32]
//              job:str topic:str
//   challenge  header, status:u8 cipher:u8 nonce[32] mac[32]  mac over hello and the challenge up to here
//   proof      mac[32]                                    over the same, with the other direction's label
//   verdict    status:u8 length:u16 reason mac[32]        status 0 without a reason: welcome
//
// Integers are little-endian. The MACs are HMAC-SHA256 with the job's secret over label, hello and challenge; the
// verdict's MAC also covers the verdict. The hello contains the cipher its sender prefers, the challenge the chosen
// cipher. If `ephemeral` is 1, both nonces are shares of a key exchange (key_exchange.h).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/net/handshake.h"
#include "comm/net/key_exchange.h"

namespace maniple {

inline constexpr std::string_view kMagic{"\x93MNPL\r\n\x1a", 8};
inline constexpr std::uint16_t kProtocolVersion = 6;
inline constexpr std::size_t kHeaderBytes = 12;
inline constexpr std::size_t kMaxHandshakeBytes = 512;
inline constexpr std::size_t kMaxBodyBytes = kMaxHandshakeBytes - kHeaderBytes;
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kMacBytes = 32;
inline constexpr std::size_t kChallengeBytes = kHeaderBytes + 2 + kNonceBytes + kMacBytes;
inline constexpr std::size_t kVerdictHeaderBytes = 3;
inline constexpr std::size_t kMaxReasonBytes = 400;
inline constexpr std::size_t kMaxJobBytes = 64;
inline constexpr std::size_t kMaxTopicBytes = 128;

using Nonce = std::array<std::uint8_t, kNonceBytes>;
using Mac = std::array<std::uint8_t, kMacBytes>;

struct WireHeader {
  std::uint16_t version = kProtocolVersion;
  std::uint16_t length = 0;
};
/// Throws ProtocolError on a wrong magic or an impossible length. `bytes` holds exactly a header.
WireHeader decode_header(std::string_view bytes);
/// Whether `bytes`, of any length, is a possible prefix of a header.
bool may_begin_header(std::string_view bytes) noexcept;

struct WireHello {
  Role role = Role::store;
  std::uint32_t generation = 0;
  std::int32_t world_size = -1;
  std::int32_t rank = -1;
  Nonce nonce{};
  std::string job;
  std::string topic;
  std::int32_t to = -1;
  Cipher cipher = Cipher::aes_256_gcm;
  bool encrypt = false;
  bool ephemeral = false;
};
std::string encode_hello(
    const WireHello& hello);                    ///< header included; throws InvalidArgument if job or topic is too long
WireHello decode_hello(std::string_view body);  ///< header excluded

enum class ChallengeStatus : std::uint8_t { ok = 0, version_refused = 1 };
struct WireChallenge {
  ChallengeStatus status = ChallengeStatus::ok;
  Cipher cipher = Cipher::aes_256_gcm;
  Nonce nonce{};
  Mac mac{};
};
/// Everything before the MAC: the part of the challenge that all MACs cover.
std::string encode_challenge_prefix(ChallengeStatus status, const Nonce& nonce, Cipher cipher = Cipher::aes_256_gcm);
WireChallenge decode_challenge(std::string_view body);  ///< header excluded

enum class Direction : std::uint8_t { from_acceptor, from_dialler, verdict };
/// `hello`, `challenge_prefix` and `verdict` are the encoded bytes; `verdict` is used only for the verdict's MAC.
Mac prove(const Secret& secret, Direction direction, std::string_view hello, std::string_view challenge_prefix,
          std::string_view verdict = {});
/// Whether the connection carries records after the handshake.
bool uses_records(Role role, bool encrypt) noexcept;
/// The keys for records after the handshake; nullopt if the connection does not use records. `shared` is the result of
/// the key exchange, if there was one.
std::optional<ConnectionKeys> keys_of(const Secret& secret, bool dialler, const WireHello& hello, Cipher cipher,
                                      std::string_view hello_bytes, std::string_view challenge_prefix,
                                      const std::optional<SharedKey>& shared = std::nullopt);
bool same_mac(const Mac& a, const Mac& b) noexcept;  ///< in constant time

std::string encode_verdict(std::string_view reason);  ///< up to its MAC; empty: welcome; long reasons are truncated
/// The length of the reason from the verdict's first bytes; nullopt: welcome. Throws ProtocolError.
std::optional<std::uint16_t> decode_verdict_header(std::string_view bytes);

/// Fills `bytes` from the kernel's random number generator.
void fill_random(std::span<std::uint8_t> bytes);

inline std::string_view as_text(std::span<const std::uint8_t> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Admission: decides whether an authenticated peer belongs to this job (job, generation, world size, rank), and
/// guesses which program an unauthenticated peer is, for the log. Pure.
struct Admission {
  std::string_view kind;  ///< from a fixed set, for counting and rate limiting
  std::string reason;     ///< empty: admitted
};

Admission judge(const Identity& here, const Address& here_address, const WireHello& there,
                const Address& there_address);

/// "HTTP client on training port", ...; "not a Maniple peer (wrong magic)" for an unknown program.
std::string_view describe_foreign_client(std::string_view first_bytes) noexcept;

}  // namespace maniple
