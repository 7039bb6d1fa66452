// OpenSSL, made to fit a library with threads of its own.
#pragma once

#include <openssl/crypto.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// Call it before anything of OpenSSL. Its first use would otherwise register a clean-up that runs when main returns, while threads of
/// ours that have used it may still be running: when they end, they free what the clean-up has freed.
inline void prepare_crypto() noexcept {
  [[maybe_unused]] static const int done = ::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
}

}  // namespace maniple
