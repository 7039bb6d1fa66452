// An authenticated connection, as a handshake leaves it.
#pragma once

#include <optional>
#include <utility>

#include "base/unique_fd.h"
#include "net/records.h"

namespace maniple {

struct SecureConnection {
  SecureConnection() = default;
  explicit SecureConnection(UniqueFd descriptor, std::optional<ConnectionKeys> record_keys = std::nullopt) noexcept
      : fd(std::move(descriptor)), keys(record_keys) {}

  int get() const noexcept { return fd.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd); }

  UniqueFd fd;
  /// All that travels from here on is in records with these keys. None: it travels as it is, which holds for
  /// connections that hand over shared memory, and for data unless MANIPLE_ENCRYPT is 1.
  std::optional<ConnectionKeys> keys;
};

}  // namespace maniple
