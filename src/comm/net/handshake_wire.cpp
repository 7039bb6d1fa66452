#include "comm/net/handshake_wire.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "comm/base/crypto.h"
#include "comm/base/system_error.h"
#include "comm/net/handshake.h"

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

Cipher get_cipher(ByteReader& reader) {
  const auto cipher = reader.get<Cipher>();
  if (cipher != Cipher::aes_256_gcm && cipher != Cipher::chacha20_poly1305) {
    throw ProtocolError(fmt::format("unknown cipher {}", static_cast<int>(cipher)));
  }
  return cipher;
}

std::string_view label_of(Direction direction) {
  switch (direction) {
    case Direction::from_acceptor: return "maniple handshake, acceptor";
    case Direction::from_dialler: return "maniple handshake, dialler";
    case Direction::verdict: break;
  }
  return "maniple handshake, verdict";
}

std::string transcript_of(std::string_view label, std::string_view hello, std::string_view challenge_prefix,
                          std::string_view verdict) {
  ByteWriter transcript;
  transcript.put_string(label);
  transcript.put_string(hello);
  transcript.put_string(challenge_prefix);
  transcript.put_string(verdict);
  return transcript.take();
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
  // The length limit applies to this protocol version only; other versions are rejected without reading on.
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
  writer.put(hello.cipher);
  writer.put(static_cast<std::uint8_t>(hello.encrypt ? 1 : 0));
  writer.put(static_cast<std::uint8_t>(hello.ephemeral ? 1 : 0));
  writer.put(hello.generation);
  writer.put(hello.world_size);
  writer.put(hello.rank);
  writer.put(hello.to);
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
  hello.cipher = get_cipher(reader);
  const auto encrypt = reader.get<std::uint8_t>();
  if (encrypt > 1) throw ProtocolError(fmt::format("unknown way of encryption {}", encrypt));
  hello.encrypt = encrypt == 1;
  const auto ephemeral = reader.get<std::uint8_t>();
  if (ephemeral > 1) throw ProtocolError(fmt::format("unknown way to exchange keys {}", ephemeral));
  hello.ephemeral = ephemeral == 1;
  if (hello.ephemeral && !uses_records(hello.role, hello.encrypt))
    throw ProtocolError("a key exchange for a connection without records");
  hello.generation = reader.get<std::uint32_t>();
  hello.world_size = reader.get<std::int32_t>();
  hello.rank = reader.get<std::int32_t>();
  hello.to = reader.get<std::int32_t>();
  hello.nonce = get_array<kNonceBytes>(reader);
  hello.job = reader.get_string(kMaxJobBytes);
  hello.topic = reader.get_string(kMaxTopicBytes);
  reader.expect_end();
  return hello;
}

std::string encode_challenge_prefix(ChallengeStatus status, const Nonce& nonce, Cipher cipher) {
  ByteWriter writer;
  writer.put(status);
  writer.put(cipher);
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
  challenge.cipher = get_cipher(reader);
  challenge.nonce = get_array<kNonceBytes>(reader);
  challenge.mac = get_array<kMacBytes>(reader);
  reader.expect_end();
  return challenge;
}

Mac prove(const Secret& secret, Direction direction, std::string_view hello, std::string_view challenge_prefix,
          std::string_view verdict) {
  Mac mac{};
  unsigned length = 0;
  const std::string text = transcript_of(label_of(direction), hello, challenge_prefix, verdict);
  const auto* made =
      MANIPLE_CRYPTO(HMAC)(MANIPLE_CRYPTO(EVP_sha256)(), secret.bytes.data(), static_cast<int>(secret.bytes.size()),
                           reinterpret_cast<const unsigned char*>(text.data()), text.size(), mac.data(), &length);
  MANIPLE_ASSERT(made != nullptr && length == kMacBytes);
  return mac;
}

bool uses_records(Role role, bool encrypt) noexcept { return role != Role::segment && (role != Role::data || encrypt); }

std::optional<ConnectionKeys> keys_of(const Secret& secret, bool dialler, const WireHello& hello, Cipher cipher,
                                      std::string_view hello_bytes, std::string_view challenge_prefix,
                                      const std::optional<SharedKey>& shared) {
  if (!uses_records(hello.role, hello.encrypt)) return std::nullopt;
  std::array<std::uint8_t, sizeof(Secret::bytes) + sizeof(SharedKey)> material{};
  auto end = std::ranges::copy(secret.bytes, material.begin()).out;
  if (shared) end = std::ranges::copy(*shared, end).out;
  const auto keys = derive_keys(cipher, std::span(material.begin(), end),
                                transcript_of("maniple records", hello_bytes, challenge_prefix, {}), dialler);
  ::explicit_bzero(material.data(), material.size());
  return keys;
}

bool same_mac(const Mac& a, const Mac& b) noexcept {
  return MANIPLE_CRYPTO(CRYPTO_memcmp)(a.data(), b.data(), a.size()) == 0;
}

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

void fill_random(std::span<std::uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_system_error("getrandom");
    bytes = bytes.subspan(got);
  }
}

Secret Secret::random() {
  Secret secret;
  do {
    fill_random(secret.bytes);
  } while (secret.is_none());
  return secret;
}

namespace {

struct Known {
  std::string_view prefix;
  std::string_view what;
};

constexpr std::string_view kHttp = "HTTP client on training port";
constexpr std::string_view kRedis = "Redis client on training port";

constexpr Known kKnown[] = {
    {"GET ", kHttp},
    {"POST ", kHttp},
    {"HEAD ", kHttp},
    {"PUT ", kHttp},
    {"DELETE ", kHttp},
    {"OPTIONS ", kHttp},
    {"CONNECT ", kHttp},
    {"PRI * HTTP", kHttp},
    {"HTTP/", "HTTP server's answer on training port"},
    {"\x16\x03", "TLS client on a training port that does not speak TLS"},
    {"SSH-", "SSH client on training port"},
    {"*1\r\n$", kRedis},
    {"*2\r\n$", kRedis},
    {"*3\r\n$", kRedis},
    {"PING", kRedis},
    {"AUTH ", kRedis},
    {"INFO", kRedis},
};

}  // namespace

Admission judge(const Identity& here, const Address& here_address, const WireHello& there,
                const Address& there_address) {
  if (there.job != here.job) {
    return {"another job", fmt::format("this is job \"{}\", not \"{}\"", here.job, there.job)};
  }
  if (there.generation < here.generation) {
    return {"stale generation",
            fmt::format("generation {} is superseded by generation {}", there.generation, here.generation)};
  }
  if (there.generation > here.generation) {
    return {"newer generation", fmt::format("generation {} is over, as generation {} is there: {} is a leftover of it",
                                            here.generation, there.generation, here_address.to_string())};
  }
  if (here.world_size >= 0 && there.world_size >= 0 && here.world_size != there.world_size) {
    return {"world size",
            fmt::format("world size is {} at {} but {} at {} (rank {})", here.world_size, here_address.to_string(),
                        there.world_size, there_address.to_string(), there.rank)};
  }
  const std::int32_t world_size = here.world_size >= 0 ? here.world_size : there.world_size;
  if (there.rank < -1 || (world_size >= 0 && there.rank >= world_size)) {
    return {"rank", fmt::format("rank {} of {} does not exist: expected 0 to {}", there.rank, there_address.to_string(),
                                world_size - 1)};
  }
  if (there.to >= 0 && here.rank >= 0 && there.to != here.rank) {
    return {"another rank",
            fmt::format("this is rank {}, not rank {}: something between the two processes leads to the wrong one",
                        here.rank, there.to)};
  }
  return {};
}

std::string_view describe_foreign_client(std::string_view first_bytes) noexcept {
  for (const Known& known : kKnown) {
    if (first_bytes.starts_with(known.prefix)) return known.what;
  }
  return "not a Maniple peer (wrong magic)";
}

}  // namespace maniple
