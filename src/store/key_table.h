// The keys and values of a store in memory, with the rules of Store and its quotas. Not thread-safe; no waiting.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "store/limits.h"

namespace maniple {

/// Values are immutable and shared, so that a thousand readers of a large one do not copy it.
using Value = std::shared_ptr<const std::string>;

struct TableQuota {
  std::size_t keys = kMaxStoreKeys;
  std::size_t bytes = kMaxStoreBytes;  ///< of keys and values together
};

class KeyTable {
 public:
  explicit KeyTable(TableQuota quota = {}) : quota_(quota) {}

  /// All that change something throw InvalidArgument, changing nothing, when it would go beyond the quota.
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

/// The number that a counter's value stands for plus `delta`. Throws InvalidArgument if the value is no number or the
/// sum does not fit. Null counts as 0.
std::int64_t sum_of(std::string_view key, const std::string* value, std::int64_t delta);

}  // namespace maniple
