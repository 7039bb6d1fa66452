#include "comm/base/crypto.h"

#include <dlfcn.h>
#include <openssl/crypto.h>
#include <openssl/opensslv.h>

#include <fmt/format.h>

#include "comm/base/unique_fd.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

void* find(void* library, const char* name) {
  void* const found = ::dlsym(library, name);
  if (found == nullptr) throw Unsupported(fmt::format("this system's OpenSSL does not have {}: {}", name, ::dlerror()));
  return found;
}

// The library is never unloaded, and the exit handler that its first use would register is disabled. That handler would
// run when main returns, while threads that used the library may still be running. When they end, they would free
// memory that the handler has already freed.
void* load() {
  const std::string name = fmt::format("libcrypto.so.{}", OPENSSL_SHLIB_VERSION);
  // Ensures a free descriptor for dlopen: raises the limit, or throws the error that descriptors ran out.
  new_event().reset();
  void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Unsupported(fmt::format(
        "OpenSSL, which proves that ranks belong to a job, cannot be loaded: {} (Debian: apt-get install libssl{})",
        ::dlerror(), OPENSSL_SHLIB_VERSION));
  }
  reinterpret_cast<decltype(&::OPENSSL_init_crypto)>(find(library, "OPENSSL_init_crypto"))(OPENSSL_INIT_NO_ATEXIT,
                                                                                           nullptr);
  return library;
}

}  // namespace

void* crypto_function(const char* name) {
  static void* const library = load();
  return find(library, name);
}

}  // namespace maniple
