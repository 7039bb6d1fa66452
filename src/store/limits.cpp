#include "store/limits.h"

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/check.h"

namespace maniple {

void require_key(std::string_view key) {
  MANIPLE_REQUIRE(!key.empty() && key.size() <= kMaxKeyBytes, "a store key of {} bytes ({}); expected 1 to {}",
                  key.size(), printable(key), kMaxKeyBytes);
}

void require_value(std::string_view value) {
  MANIPLE_REQUIRE(value.size() <= kMaxValueBytes, "a store value of {} bytes; at most {} are allowed", value.size(),
                  kMaxValueBytes);
}

void require_keys(std::span<const std::string> keys) {
  MANIPLE_REQUIRE(keys.size() <= kMaxKeysPerRequest, "{} keys in one request; at most {} are allowed", keys.size(),
                  kMaxKeysPerRequest);
  for (const std::string& key : keys) require_key(key);
}

std::string printable(std::string_view key) {
  constexpr std::size_t kShown = 80;
  std::string text = "\"";
  for (const char c : key.substr(0, kShown)) {
    if (c >= ' ' && c <= '~' && c != '"' && c != '\\') {
      text += c;
    } else {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  text += key.size() > kShown ? "...\"" : "\"";
  return text;
}

std::string missing_keys_text(std::span<const std::string> keys, const std::vector<bool>& present, double seconds) {
  constexpr std::size_t kNamed = 16;
  std::vector<std::string> named;
  std::size_t missing = 0;
  for (std::size_t i = 0; i < keys.size() && i < present.size(); ++i) {
    if (present[i]) continue;
    if (++missing <= kNamed) named.push_back(printable(keys[i]));
  }
  if (missing == 0)
    return fmt::format("waited {:.1f} s; the last of {} keys was set just too late", seconds, keys.size());
  return fmt::format("waited {:.1f} s; {} of {} keys missing: {}{}", seconds, missing, keys.size(),
                     fmt::join(named, ", "), missing > kNamed ? fmt::format(" and {} more", missing - kNamed) : "");
}

}  // namespace maniple
