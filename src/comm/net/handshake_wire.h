// The bytes of the handshake, without any I/O: so that they can be tested and fuzzed alone.
//
//   header     magic[8] version:u16 length:u16            the same in all versions, so that they can refuse each other
//   hello      header, role:u8 cipher:u8 encrypt:u8 generation:u32 world_size:i32 rank:i32 to:i32 nonce[32] job:str
//              topic:str
//   challenge  header, status:u8 cipher:u8 nonce[32] mac[32]  mac over hello and the challenge up to here
//   proof      mac[32]                                    over the same, with the other direction's label
//   verdict    status:u8 length:u16 reason mac[32]        empty and 0: welcome
//
// Integers are little-endian. The MACs are HMAC-SHA256 with the job's secret over label, hello and challenge, that of
// the verdict over the verdict too. The hello names the cipher that its sender prefers, the challenge the one that
// counts.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/net/handshake.h"

namespace maniple {

inline constexpr std::string_view kMagic{"\x93MNPL\r\n\x1a", 8};
inline constexpr std::uint16_t kProtocolVersion = 5;
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
/// Whether `bytes`, of any length, can be the beginning of a header.
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
};
std::string encode_hello(
    const WireHello& hello);                    ///< header included; throws InvalidArgument for too long a job or topic
WireHello decode_hello(std::string_view body);  ///< header excluded

enum class ChallengeStatus : std::uint8_t { ok = 0, version_refused = 1 };
struct WireChallenge {
  ChallengeStatus status = ChallengeStatus::ok;
  Cipher cipher = Cipher::aes_256_gcm;
  Nonce nonce{};
  Mac mac{};
};
/// Everything up to the MAC, which is the part that all MACs cover.
std::string encode_challenge_prefix(ChallengeStatus status, const Nonce& nonce, Cipher cipher = Cipher::aes_256_gcm);
WireChallenge decode_challenge(std::string_view body);  ///< header excluded

enum class Direction : std::uint8_t { from_acceptor, from_dialler, verdict };
/// `hello`, `challenge_prefix` and `verdict` are the encoded bytes, the last only for its own MAC.
Mac prove(const Secret& secret, Direction direction, std::string_view hello, std::string_view challenge_prefix,
          std::string_view verdict = {});
/// The keys for what follows the handshake, where it is to be in records.
std::optional<ConnectionKeys> keys_of(const Secret& secret, bool dialler, const WireHello& hello, Cipher cipher,
                                      std::string_view hello_bytes, std::string_view challenge_prefix);
bool same_mac(const Mac& a, const Mac& b) noexcept;  ///< in constant time

std::string encode_verdict(std::string_view reason);  ///< up to its MAC; empty: welcome; longer reasons are cut
/// The length of the reason from the verdict's first bytes; nullopt: welcome. Throws ProtocolError.
std::optional<std::uint16_t> decode_verdict_header(std::string_view bytes);

/// Fills from the kernel's generator.
void fill_random(std::span<std::uint8_t> bytes);

inline std::string_view as_text(std::span<const std::uint8_t> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Who may connect: whether an authenticated peer belongs here (job, generation, world size, rank), and which program
/// an unauthenticated one probably is, for the log. Pure.
struct Admission {
  std::string_view kind;  ///< for counting and throttling: one of a fixed set
  std::string reason;     ///< empty: it belongs here
};

Admission judge(const Identity& here, const Address& here_address, const WireHello& there,
                const Address& there_address);

/// "HTTP client on training port", ...; "not a Maniple peer (wrong magic)" when it is none of the known ones.
std::string_view describe_foreign_client(std::string_view first_bytes) noexcept;

}  // namespace maniple
