#include "comm/net/secure_connection.h"

#include <sys/auxv.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/crypto.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kIvBytes = 12;
constexpr std::size_t kDigestBytes = 32;
constexpr std::size_t kKeptBytes = 4096;  // memory kept between records

/// HKDF (RFC 5869) with SHA-256.
void hkdf(std::span<const std::uint8_t> key, std::span<const std::uint8_t> salt, std::string_view info,
          std::span<std::uint8_t> out) {
  static EVP_KDF* const kKdf = MANIPLE_CRYPTO(EVP_KDF_fetch)(nullptr, "HKDF", nullptr);
  const std::unique_ptr<EVP_KDF_CTX, void (*)(EVP_KDF_CTX*)> context(MANIPLE_CRYPTO(EVP_KDF_CTX_new)(kKdf),
                                                                     MANIPLE_CRYPTO(EVP_KDF_CTX_free));
  MANIPLE_ASSERT(context != nullptr);
  // OSSL_PARAM lacks const; a derivation only reads the data.
  const auto bytes = [](const char* name, const void* data, std::size_t size) {
    return MANIPLE_CRYPTO(OSSL_PARAM_construct_octet_string)(name, const_cast<void*>(data), size);
  };
  char digest[] = "SHA256";
  const OSSL_PARAM parameters[] = {
      MANIPLE_CRYPTO(OSSL_PARAM_construct_utf8_string)(OSSL_KDF_PARAM_DIGEST, digest, 0),
      bytes(OSSL_KDF_PARAM_KEY, key.data(), key.size()), bytes(OSSL_KDF_PARAM_SALT, salt.data(), salt.size()),
      bytes(OSSL_KDF_PARAM_INFO, info.data(), info.size()), MANIPLE_CRYPTO(OSSL_PARAM_construct_end)()};
  const int derived = MANIPLE_CRYPTO(EVP_KDF_derive)(context.get(), out.data(), out.size(), parameters);
  MANIPLE_ASSERT(derived == 1);
}

const EVP_CIPHER* evp_cipher(Cipher cipher) {
  static const EVP_CIPHER* const kAes = MANIPLE_CRYPTO(EVP_CIPHER_fetch)(nullptr, "AES-256-GCM", nullptr);
  static const EVP_CIPHER* const kChaCha = MANIPLE_CRYPTO(EVP_CIPHER_fetch)(nullptr, "ChaCha20-Poly1305", nullptr);
  return cipher == Cipher::aes_256_gcm ? kAes : kChaCha;
}

std::uint32_t length_in(const char* header) noexcept {
  std::uint32_t length = 0;
  for (std::size_t i = 0; i < kRecordHeaderBytes; ++i) {
    length |= std::uint32_t{static_cast<std::uint8_t>(header[i])} << (8 * i);
  }
  return length;
}

std::uint8_t* as_bytes(char* text) noexcept { return reinterpret_cast<std::uint8_t*>(text); }
const std::uint8_t* as_bytes(const char* text) noexcept { return reinterpret_cast<const std::uint8_t*>(text); }

}  // namespace

Cipher preferred_cipher() noexcept {
#if defined(__x86_64__)
  const bool fast = __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  constexpr unsigned long kAes = 1UL << 3;
  constexpr unsigned long kPolynomials = 1UL << 4;
  const unsigned long has = ::getauxval(AT_HWCAP);
  const bool fast = (has & kAes) != 0 && (has & kPolynomials) != 0;
#else
  const bool fast = false;
#endif
  return fast ? Cipher::aes_256_gcm : Cipher::chacha20_poly1305;
}

ConnectionKeys derive_keys(Cipher cipher, std::span<const std::uint8_t> secret, std::string_view transcript,
                           bool dialler) {
  std::array<std::uint8_t, kDigestBytes> digest;
  unsigned size = 0;
  const int digested = MANIPLE_CRYPTO(EVP_Digest)(transcript.data(), transcript.size(), digest.data(), &size,
                                                  MANIPLE_CRYPTO(EVP_sha256)(), nullptr);
  MANIPLE_ASSERT(digested == 1 && size == digest.size());
  std::array<std::uint8_t, 2 * sizeof(TrafficSecret)> both;
  hkdf(secret, digest, "maniple records, dialler then acceptor", both);
  ConnectionKeys keys{.cipher = cipher};
  TrafficSecret& of_dialler = dialler ? keys.send : keys.receive;
  TrafficSecret& of_acceptor = dialler ? keys.receive : keys.send;
  std::copy_n(both.begin(), of_dialler.size(), of_dialler.begin());
  std::copy_n(both.begin() + sizeof(TrafficSecret), of_acceptor.size(), of_acceptor.begin());
  ::explicit_bzero(both.data(), both.size());
  return keys;
}

// --- the cipher ---

struct RecordCipher::State {
  std::unique_ptr<EVP_CIPHER_CTX, void (*)(EVP_CIPHER_CTX*)> context{nullptr, MANIPLE_CRYPTO(EVP_CIPHER_CTX_free)};
  Cipher cipher = Cipher::aes_256_gcm;
  bool seals = false;
  TrafficSecret secret{};
  std::array<std::uint8_t, kIvBytes> iv{};
  std::uint64_t records_per_key = kRecordsPerKey;
  std::uint64_t number = 0;  // number of the next record with this key

  ~State() { ::explicit_bzero(secret.data(), secret.size()); }
};

RecordCipher::RecordCipher(Cipher cipher, const TrafficSecret& secret, bool seals, std::uint64_t records_per_key)
    : state_(std::make_unique<State>()) {
  state_->cipher = cipher;
  state_->seals = seals;
  state_->secret = secret;
  state_->records_per_key = records_per_key;
  state_->context.reset(MANIPLE_CRYPTO(EVP_CIPHER_CTX_new)());
  MANIPLE_ASSERT(state_->context != nullptr);
  set_key();
}

RecordCipher::~RecordCipher() = default;
RecordCipher::RecordCipher(RecordCipher&&) noexcept = default;
RecordCipher& RecordCipher::operator=(RecordCipher&&) noexcept = default;

/// Derives the key from the secret, and replaces the secret by the one for the next key.
void RecordCipher::set_key() {
  std::array<std::uint8_t, kKeyBytes + kIvBytes + sizeof(TrafficSecret)> derived;
  constexpr std::array<std::uint8_t, kDigestBytes> kNoSalt{};
  hkdf(state_->secret, kNoSalt, "maniple records, key", derived);
  std::copy_n(derived.begin() + kKeyBytes, kIvBytes, state_->iv.begin());
  std::copy_n(derived.begin() + kKeyBytes + kIvBytes, state_->secret.size(), state_->secret.begin());
  const int set = MANIPLE_CRYPTO(EVP_CipherInit_ex)(state_->context.get(), evp_cipher(state_->cipher), nullptr,
                                                    derived.data(), nullptr, state_->seals ? 1 : 0);
  MANIPLE_ASSERT(set == 1);
  ::explicit_bzero(derived.data(), derived.size());
  state_->number = 0;
}

void RecordCipher::begin(const std::uint8_t* header) {
  State& state = *state_;
  if (state.number == state.records_per_key) set_key();
  std::array<std::uint8_t, kIvBytes> nonce = state.iv;
  for (std::size_t i = 0; i < sizeof state.number; ++i) {
    nonce[kIvBytes - 1 - i] ^= static_cast<std::uint8_t>(state.number >> (8 * i));
  }
  ++state.number;
  int moved = 0;
  const int begun = MANIPLE_CRYPTO(EVP_CipherInit_ex)(state.context.get(), nullptr, nullptr, nullptr, nonce.data(), -1);
  const int bound = MANIPLE_CRYPTO(EVP_CipherUpdate)(state.context.get(), nullptr, &moved, header, kRecordHeaderBytes);
  MANIPLE_ASSERT(begun == 1 && bound == 1);
}

void RecordCipher::step(const std::uint8_t* from, std::size_t size, std::uint8_t* to) {
  int moved = 0;
  const int stepped = MANIPLE_CRYPTO(EVP_CipherUpdate)(state_->context.get(), to, &moved, from, static_cast<int>(size));
  MANIPLE_ASSERT(stepped == 1 && static_cast<std::size_t>(moved) == size);
}

void RecordCipher::seal(std::uint8_t* tag) {
  int moved = 0;
  const int ended = MANIPLE_CRYPTO(EVP_CipherFinal_ex)(state_->context.get(), tag, &moved);
  const int got =
      MANIPLE_CRYPTO(EVP_CIPHER_CTX_ctrl)(state_->context.get(), EVP_CTRL_AEAD_GET_TAG, kRecordTagBytes, tag);
  MANIPLE_ASSERT(ended == 1 && moved == 0 && got == 1);
}

bool RecordCipher::opens(const std::uint8_t* tag) {
  std::uint8_t none[kRecordTagBytes];
  int moved = 0;
  // OpenSSL only reads the tag.
  const int set = MANIPLE_CRYPTO(EVP_CIPHER_CTX_ctrl)(state_->context.get(), EVP_CTRL_AEAD_SET_TAG, kRecordTagBytes,
                                                      const_cast<std::uint8_t*>(tag));
  return set == 1 && MANIPLE_CRYPTO(EVP_CipherFinal_ex)(state_->context.get(), none, &moved) == 1;
}

// --- sealing ---

void RecordSealer::seal_record(std::span<const iovec> parts, std::size_t size, char* to) {
  MANIPLE_ASSERT(size > 0 && size <= kMaxRecordBytes);
  std::uint8_t* at = as_bytes(to);
  for (std::size_t i = 0; i < kRecordHeaderBytes; ++i) at[i] = static_cast<std::uint8_t>(size >> (8 * i));
  cipher_.begin(at);
  at += kRecordHeaderBytes;
  for (std::size_t left = size; left > 0; parts = parts.subspan(1)) {
    const std::size_t step = std::min(left, parts.front().iov_len);
    if (step > 0) cipher_.step(static_cast<const std::uint8_t*>(parts.front().iov_base), step, at);
    at += step;
    left -= step;
  }
  cipher_.seal(at);
}

void RecordSealer::seal(std::span<const std::string_view> parts, std::string& out) {
  constexpr std::size_t kMostParts = 8;
  MANIPLE_ASSERT(parts.size() <= kMostParts);
  std::array<iovec, kMostParts> rest;
  std::size_t left = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    rest[i] = {const_cast<char*>(parts[i].data()), parts[i].size()};  // iovec lacks const; sealing only reads
    left += parts[i].size();
  }
  std::size_t first = 0;
  while (left > 0) {
    std::size_t size = std::min(left, kMaxRecordBytes);
    left -= size;
    const std::size_t at = out.size();
    out.resize(at + size + kRecordOverhead);
    seal_record(std::span(rest).subspan(first, parts.size() - first), size, out.data() + at);
    while (size > 0) {
      iovec& part = rest[first];
      const std::size_t step = std::min(size, part.iov_len);
      part = {static_cast<char*>(part.iov_base) + step, part.iov_len - step};
      size -= step;
      if (part.iov_len == 0) ++first;
    }
  }
}

// --- opening ---

std::size_t RecordOpener::size_of(const char* header) {
  if (failed_) throw ProtocolError("bytes behind some that were not authentic");
  const std::size_t size = length_in(header);
  if (size > 0 && size <= kMaxRecordBytes) return size;
  failed_ = true;
  throw ProtocolError(fmt::format("a record of {} bytes where 1 to {} are possible: the bytes are not authentic", size,
                                  kMaxRecordBytes));
}

void RecordOpener::end_record(const char* tag) {
  if (cipher_.opens(as_bytes(tag))) return;
  failed_ = true;
  throw ProtocolError(
      "bytes that are not authentic: something between the two processes changed, dropped, repeated or added some");
}

std::string_view RecordOpener::open_record(char* record, std::size_t size) {
  cipher_.begin(as_bytes(record));
  char* const body = record + kRecordHeaderBytes;
  cipher_.step(as_bytes(body), size, as_bytes(body));
  end_record(body + size);
  return {body, size};
}

void RecordOpener::open_record(const char* record, std::size_t size, std::span<const iovec> to) {
  cipher_.begin(as_bytes(record));
  const char* body = record + kRecordHeaderBytes;
  for (std::size_t left = size; left > 0; to = to.subspan(1)) {
    const std::size_t step = std::min(left, to.front().iov_len);
    if (step > 0) cipher_.step(as_bytes(body), step, static_cast<std::uint8_t*>(to.front().iov_base));
    body += step;
    left -= step;
  }
  end_record(body);
}

std::optional<std::string_view> RecordOpener::next(std::span<char>& bytes) {
  if (failed_) throw ProtocolError("bytes behind some that were not authentic");
  if (std::exchange(opened_partial_, false)) {
    partial_.clear();
    if (partial_.capacity() > kKeptBytes) partial_ = {};
  }
  const auto take = [&](std::size_t needed) {  // moves bytes to `partial_` until it has `needed`; false if too few
    const std::size_t step = std::min(needed - partial_.size(), bytes.size());
    partial_.append(bytes.data(), step);
    bytes = bytes.subspan(step);
    return partial_.size() == needed;
  };
  const bool in_place = partial_.empty() && bytes.size() >= kRecordHeaderBytes;
  if (!in_place && partial_.size() < kRecordHeaderBytes && !take(kRecordHeaderBytes)) return std::nullopt;
  const std::size_t size = size_of(in_place ? bytes.data() : partial_.data());
  const std::size_t whole = size + kRecordOverhead;
  if (in_place && bytes.size() >= whole) {
    char* const record = bytes.data();
    bytes = bytes.subspan(whole);
    return open_record(record, size);
  }
  if (!take(whole)) return std::nullopt;
  opened_partial_ = true;
  return open_record(partial_.data(), size);
}

}  // namespace maniple
