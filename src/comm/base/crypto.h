// OpenSSL's libcrypto, loaded at the first call of one of its functions.
//
// Maniple does not link libcrypto because loading it takes 0.8 ms, a sixth of the time in which the launcher starts and
// ends two ranks, and a job on one host does not need it.
#pragma once

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// Returns the libcrypto function `name`, loading the library on first use. Throws Unsupported if libcrypto is not
/// installed or lacks the function.
void* crypto_function(const char* name);

/// MANIPLE_CRYPTO(HMAC)(...) calls HMAC. Include the OpenSSL header that declares the function.
#define MANIPLE_CRYPTO(function)                                                                              \
  ([] {                                                                                                       \
    static const auto found = reinterpret_cast<decltype(&::function)>(::maniple::crypto_function(#function)); \
    return found;                                                                                             \
  }())

}  // namespace maniple
