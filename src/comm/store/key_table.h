// An in-memory table of keys and values with the rules of Store, its limits and quotas. Not thread-safe; never waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "comm/base/fork_guard.h"

namespace maniple {

// Limits on keys and values, the same for every kind of store. A call beyond a limit throws InvalidArgument and changes
// nothing.

inline constexpr std::size_t kMaxKeyBytes = 1024;
inline constexpr std::size_t kMaxValueBytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxKeysPerRequest = 100'000;
inline constexpr std::size_t kMaxStoreKeys = 1'000'000;
inline constexpr std::size_t kMaxStoreBytes = std::size_t{1} << 30;

void require_key(std::string_view key);
void require_value(std::string_view value);
void require_keys(std::span<const std::string> keys);

/// Throws Aborted in a child of fork(): the parent would miss what the child set or took.
void require_owned(const ForkGuard& guard, const std::string& store);

/// A key for messages: quoted, with bytes outside printable ASCII as \xNN; long keys are truncated.
std::string printable(std::string_view key);

/// Text for a Timeout: "waited 3.0 s; 2 of 8 keys are missing: "a", "b"".
std::string missing_keys_text(std::span<const std::string> keys, const std::vector<bool>& present, double seconds);

/// Values are immutable and shared, so a thousand readers of a large value do not copy it.
using Value = std::shared_ptr<const std::string>;

struct TableQuota {
  std::size_t keys = kMaxStoreKeys;
  std::size_t bytes = kMaxStoreBytes;  ///< sum of key and value sizes
};

class KeyTable {
 public:
  explicit KeyTable(TableQuota quota = {}) : quota_(quota) {}

  /// The modifying functions throw InvalidArgument, and change nothing, if the change would exceed the quota.
  void set(std::string_view key, Value value);
  Value find(std::string_view key) const;  ///< null when absent
  std::int64_t add(std::string_view key, std::int64_t delta);
  struct Swap {
    bool changed;
    std::string_view now;  ///< what Store::compare_set returns; valid until the next change
  };
  Swap compare_set(std::string_view key, std::string_view expected, std::string_view desired);
  bool erase(std::string_view key);
  std::size_t size() const noexcept { return values_.size(); }

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>()(text); }
  };
  TableQuota quota_;
  std::size_t bytes_ = 0;
  std::unordered_map<std::string, Value, Hash, std::equal_to<>> values_;
};

/// The counter `value` plus `delta`; null counts as 0. Throws InvalidArgument if the value is not a number or the sum
/// overflows.
std::int64_t sum_of(std::string_view key, const std::string* value, std::int64_t delta);

}  // namespace maniple
