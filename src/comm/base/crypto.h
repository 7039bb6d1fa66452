// libcrypto of OpenSSL, loaded when something of it is first called.
//
// Loading takes 0.8 ms, a sixth of the time in which the launcher starts and ends two ranks, and on one host it needs
// nothing of it. So nothing here is linked with it.
#pragma once

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// The function of that name; libcrypto is loaded by then. Throws Unsupported where it is not installed, or does not
/// have it.
void* crypto_function(const char* name);

/// MANIPLE_CRYPTO(HMAC)(...) calls HMAC; the header that declares it must be included.
#define MANIPLE_CRYPTO(function)                                                                              \
  ([] {                                                                                                       \
    static const auto found = reinterpret_cast<decltype(&::function)>(::maniple::crypto_function(#function)); \
    return found;                                                                                             \
  }())

}  // namespace maniple
