// SHA-256, computed by OpenSSL.
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "comm/base/check.h"
#include "comm/base/crypto.h"

namespace maniple {

class Sha256 {
 public:
  Sha256() : context_(nullptr, MANIPLE_CRYPTO(EVP_MD_CTX_free)) {
    context_.reset(MANIPLE_CRYPTO(EVP_MD_CTX_new)());
    MANIPLE_ASSERT(context_ != nullptr &&
                   MANIPLE_CRYPTO(EVP_DigestInit_ex)(context_.get(), MANIPLE_CRYPTO(EVP_sha256)(), nullptr) == 1);
  }
  void add(const void* data, std::size_t bytes) {
    MANIPLE_ASSERT(MANIPLE_CRYPTO(EVP_DigestUpdate)(context_.get(), data, bytes) == 1);
  }
  /// 64 hexadecimal digits. Ends the use of the object.
  std::string take() {
    std::array<unsigned char, EVP_MAX_MD_SIZE> bytes;
    unsigned length = 0;
    MANIPLE_ASSERT(MANIPLE_CRYPTO(EVP_DigestFinal_ex)(context_.get(), bytes.data(), &length) == 1 && length == 32);
    std::string digits;
    for (unsigned i = 0; i < length; ++i) digits += format_text("{:02x}", bytes[i]);
    return digits;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace maniple
