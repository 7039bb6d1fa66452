#include <sys/random.h>

#include <cerrno>

#include "base/system_error.h"
#include "net/handshake.h"
#include "net/handshake_wire.h"

namespace maniple {

void fill_random(std::span<std::uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_system_error("getrandom");
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

Secret Secret::random() {
  Secret secret;
  do {
    fill_random(secret.bytes);
  } while (secret.is_none());
  return secret;
}

}  // namespace maniple
