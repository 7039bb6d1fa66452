#include "net/handshake_wire.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>

#include <fmt/format.h>

#include "base/check.h"
#include "base/codec.h"
#include "base/crypto.h"

namespace maniple {
namespace {

constexpr std::uint8_t kWelcome = 0;
constexpr std::uint8_t kRefused = 1;

std::string with_header(std::string_view body, std::size_t announced) {
  ByteWriter writer;
  writer.put_raw(kMagic);
  writer.put(kProtocolVersion);
  writer.put(static_cast<std::uint16_t>(announced));
  writer.put_raw(body);
  return writer.take();
}

template <std::size_t N>
std::array<std::uint8_t, N> get_array(ByteReader& reader) {
  std::array<std::uint8_t, N> result;
  const std::string_view raw = reader.get_raw(N);
  std::copy(raw.begin(), raw.end(), result.begin());
  return result;
}

}  // namespace

bool may_begin_header(std::string_view bytes) noexcept {
  const std::size_t known = std::min(bytes.size(), kMagic.size());
  return bytes.substr(0, known) == kMagic.substr(0, known);
}

WireHeader decode_header(std::string_view bytes) {
  ByteReader reader(bytes);
  if (reader.get_raw(kMagic.size()) != kMagic) throw ProtocolError("wrong magic");
  WireHeader header;
  header.version = reader.get<std::uint16_t>();
  header.length = reader.get<std::uint16_t>();
  reader.expect_end();
  // Only our own version's lengths can be judged; another version is refused without reading on.
  if (header.version == kProtocolVersion && header.length > kMaxBodyBytes) {
    throw ProtocolError(
        fmt::format("a handshake of {} bytes where at most {} are allowed", header.length, kMaxBodyBytes));
  }
  return header;
}

std::string encode_hello(const WireHello& hello) {
  MANIPLE_REQUIRE(hello.job.size() <= kMaxJobBytes, "the job name has {} bytes; at most {} are allowed",
                  hello.job.size(), kMaxJobBytes);
  MANIPLE_REQUIRE(hello.topic.size() <= kMaxTopicBytes, "the topic has {} bytes; at most {} are allowed",
                  hello.topic.size(), kMaxTopicBytes);
  ByteWriter writer;
  writer.put(hello.role);
  writer.put(hello.generation);
  writer.put(hello.world_size);
  writer.put(hello.rank);
  writer.put_raw(as_text(hello.nonce));
  writer.put_string(hello.job);
  writer.put_string(hello.topic);
  return with_header(writer.bytes(), writer.bytes().size());
}

WireHello decode_hello(std::string_view body) {
  ByteReader reader(body);
  WireHello hello;
  hello.role = reader.get<Role>();
  if (hello.role < Role::store || hello.role > Role::segment) {
    throw ProtocolError(fmt::format("unknown role {}", static_cast<int>(hello.role)));
  }
  hello.generation = reader.get<std::uint32_t>();
  hello.world_size = reader.get<std::int32_t>();
  hello.rank = reader.get<std::int32_t>();
  hello.nonce = get_array<kNonceBytes>(reader);
  hello.job = reader.get_string(kMaxJobBytes);
  hello.topic = reader.get_string(kMaxTopicBytes);
  reader.expect_end();
  return hello;
}

std::string encode_challenge_prefix(ChallengeStatus status, const Nonce& nonce) {
  ByteWriter writer;
  writer.put(status);
  writer.put_raw(as_text(nonce));
  return with_header(writer.bytes(), kChallengeBytes - kHeaderBytes);
}

WireChallenge decode_challenge(std::string_view body) {
  ByteReader reader(body);
  WireChallenge challenge;
  challenge.status = reader.get<ChallengeStatus>();
  if (challenge.status > ChallengeStatus::version_refused) {
    throw ProtocolError(fmt::format("unknown challenge status {}", static_cast<int>(challenge.status)));
  }
  challenge.nonce = get_array<kNonceBytes>(reader);
  challenge.mac = get_array<kMacBytes>(reader);
  reader.expect_end();
  return challenge;
}

Mac prove(const Secret& secret, Direction direction, std::string_view hello, std::string_view challenge_prefix) {
  ByteWriter transcript;
  transcript.put_string(direction == Direction::from_acceptor ? "maniple handshake, acceptor"
                                                              : "maniple handshake, dialler");
  transcript.put_string(hello);
  transcript.put_string(challenge_prefix);
  Mac mac{};
  unsigned length = 0;
  prepare_crypto();
  const std::string& text = transcript.bytes();
  const auto* made = ::HMAC(::EVP_sha256(), secret.bytes.data(), static_cast<int>(secret.bytes.size()),
                            reinterpret_cast<const unsigned char*>(text.data()), text.size(), mac.data(), &length);
  MANIPLE_ASSERT(made != nullptr && length == kMacBytes);
  return mac;
}

bool same_mac(const Mac& a, const Mac& b) noexcept { return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

std::string encode_verdict(std::string_view reason) {
  ByteWriter writer;
  const std::string_view cut = reason.substr(0, kMaxReasonBytes);
  writer.put(cut.empty() ? kWelcome : kRefused);
  writer.put(static_cast<std::uint16_t>(cut.size()));
  writer.put_raw(cut);
  return writer.take();
}

std::optional<std::uint16_t> decode_verdict_header(std::string_view bytes) {
  ByteReader reader(bytes);
  const auto status = reader.get<std::uint8_t>();
  const auto length = reader.get<std::uint16_t>();
  reader.expect_end();
  if (status > kRefused || length > kMaxReasonBytes || (status == kWelcome) != (length == 0)) {
    throw ProtocolError(fmt::format("impossible verdict: status {}, {} bytes", status, length));
  }
  if (status == kWelcome) return std::nullopt;
  return length;
}

}  // namespace maniple
