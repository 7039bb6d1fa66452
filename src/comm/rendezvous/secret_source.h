// Where the job's secret comes from: never from argv, never from a variable's value.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "comm/net/handshake.h"

namespace maniple {

/// From MANIPLE_SECRET_FD (an inherited descriptor) or MANIPLE_SECRET_FILE (mode 0600); nullopt when neither is set.
/// Throws InvalidArgument naming the variable.
std::optional<Secret> secret_from_environment();

/// From a file of mode 0600. `what` begins the text of an InvalidArgument: `--secret-file is "path"`.
Secret secret_from_file(const std::string& path, const std::string& what);

/// 64 hexadecimal digits, a line break after them or not, or 32 raw bytes. nullopt if it is neither, or all zero.
std::optional<Secret> parse_secret(std::string_view text);
std::string hex_of(const Secret& secret);

}  // namespace maniple
