#include "base/crypto.h"

#include <openssl/crypto.h>

namespace maniple {

void prepare_crypto() noexcept {
  [[maybe_unused]] static const int done = ::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
}

}  // namespace maniple
