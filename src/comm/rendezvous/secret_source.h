// Sources of the job's secret: never argv, never a variable's value.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "comm/net/handshake.h"

namespace maniple {

/// The secret from MANIPLE_SECRET_FD (an inherited descriptor) or MANIPLE_SECRET_FILE (mode 0600); nullopt when neither
/// is set. Throws InvalidArgument naming the variable.
std::optional<Secret> secret_from_environment();

/// The secret from a file with mode 0600. `what` begins the text of an InvalidArgument: `--secret-file is "path"`.
Secret secret_from_file(const std::string& path, const std::string& what);

/// Parses 64 hexadecimal digits, optionally followed by a line break, or 32 raw bytes. nullopt for anything else, or if
/// all bytes are zero.
std::optional<Secret> parse_secret(std::string_view text);
std::string hex_of(const Secret& secret);

}  // namespace maniple
