// What a store takes, the same for all kinds. Beyond it: InvalidArgument to the caller, and nothing is changed.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace maniple {

inline constexpr std::size_t kMaxKeyBytes = 1024;
inline constexpr std::size_t kMaxValueBytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxKeysPerRequest = 100'000;
inline constexpr std::size_t kMaxStoreKeys = 1'000'000;
inline constexpr std::size_t kMaxStoreBytes = std::size_t{1} << 30;

void require_key(std::string_view key);
void require_value(std::string_view value);
void require_keys(std::span<const std::string> keys);

/// A key for messages: quoted, other bytes than printable ASCII as \xNN, cut when long.
std::string printable(std::string_view key);

/// "waited 3.0 s; 2 of 8 keys are missing: "a", "b"" for a Timeout.
std::string missing_keys_text(std::span<const std::string> keys, const std::vector<bool>& present, double seconds);

}  // namespace maniple
