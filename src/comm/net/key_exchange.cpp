#include "comm/net/key_exchange.h"

#include <openssl/err.h>
#include <openssl/evp.h>

#include <cstring>

#include "comm/base/check.h"
#include "comm/base/crypto.h"
#include "comm/net/handshake_wire.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

struct Free {
  void operator()(EVP_PKEY* key) const { MANIPLE_CRYPTO(EVP_PKEY_free)(key); }
  void operator()(EVP_PKEY_CTX* context) const { MANIPLE_CRYPTO(EVP_PKEY_CTX_free)(context); }
};
using Key = std::unique_ptr<EVP_PKEY, Free>;
using Context = std::unique_ptr<EVP_PKEY_CTX, Free>;

constexpr const char* kAlgorithm = "X25519";

/// The kernel's random bytes: OpenSSL's own generator takes 0.6 ms to start.
Key make_key() {
  std::array<std::uint8_t, sizeof(KeyShare)> bytes;
  fill_random(bytes);
  Key key(MANIPLE_CRYPTO(EVP_PKEY_new_raw_private_key_ex)(nullptr, kAlgorithm, nullptr, bytes.data(), bytes.size()));
  ::explicit_bzero(bytes.data(), bytes.size());
  if (!key) MANIPLE_CRYPTO(ERR_clear_error)();
  return key;
}

}  // namespace

struct KeyExchange::Pair {
  Key key;
};

bool KeyExchange::available() {
  static const bool kAvailable = [] {
    EVP_KEYMGMT* const method = MANIPLE_CRYPTO(EVP_KEYMGMT_fetch)(nullptr, kAlgorithm, nullptr);
    if (method == nullptr) MANIPLE_CRYPTO(ERR_clear_error)();
    MANIPLE_CRYPTO(EVP_KEYMGMT_free)(method);
    return method != nullptr;
  }();
  return kAvailable;
}

KeyExchange::KeyExchange() : pair_(std::make_unique<Pair>()) {
  pair_->key = make_key();
  if (!pair_->key) throw Unsupported("this system's OpenSSL cannot make X25519 keys");
  std::size_t size = share_.size();
  const int got = MANIPLE_CRYPTO(EVP_PKEY_get_raw_public_key)(pair_->key.get(), share_.data(), &size);
  MANIPLE_ASSERT(got == 1 && size == share_.size());
}

KeyExchange::~KeyExchange() = default;
KeyExchange::KeyExchange(KeyExchange&&) noexcept = default;
KeyExchange& KeyExchange::operator=(KeyExchange&&) noexcept = default;

SharedKey KeyExchange::derive(const KeyShare& theirs) const {
  const Key peer(
      MANIPLE_CRYPTO(EVP_PKEY_new_raw_public_key_ex)(nullptr, kAlgorithm, nullptr, theirs.data(), theirs.size()));
  const Context context(MANIPLE_CRYPTO(EVP_PKEY_CTX_new_from_pkey)(nullptr, pair_->key.get(), nullptr));
  MANIPLE_ASSERT(peer != nullptr && context != nullptr);
  SharedKey shared{};
  std::size_t size = shared.size();
  if (MANIPLE_CRYPTO(EVP_PKEY_derive_init)(context.get()) != 1 ||
      MANIPLE_CRYPTO(EVP_PKEY_derive_set_peer)(context.get(), peer.get()) != 1 ||
      MANIPLE_CRYPTO(EVP_PKEY_derive)(context.get(), shared.data(), &size) != 1 || size != shared.size()) {
    MANIPLE_CRYPTO(ERR_clear_error)();
    throw ProtocolError("a key share that no honest peer sends");
  }
  return shared;
}

}  // namespace maniple
