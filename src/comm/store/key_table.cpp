#include "comm/store/key_table.h"

#include <charconv>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"

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

void require_owned(const ForkGuard& guard, const std::string& store) {
  if (guard.owned()) return;
  throw Aborted(store + ": a child of fork() cannot use its parent's store; open one of its own");
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

std::int64_t sum_of(std::string_view key, const std::string* value, std::int64_t delta) {
  std::int64_t number = 0;
  if (value != nullptr) {
    const char* last = value->data() + value->size();
    const auto [end, error] = std::from_chars(value->data(), last, number);
    MANIPLE_REQUIRE(error == std::errc() && end == last,
                    "add to store key {}: it holds {}, which is not a whole number", printable(key), printable(*value));
  }
  std::int64_t sum = 0;
  MANIPLE_REQUIRE(!__builtin_add_overflow(number, delta, &sum), "add to store key {}: {} + {} does not fit 64 bits",
                  printable(key), number, delta);
  return sum;
}

void KeyTable::set(std::string_view key, Value value) {
  require_key(key);
  require_value(*value);
  const auto found = values_.find(key);
  const std::size_t before = found == values_.end() ? 0 : key.size() + found->second->size();
  const std::size_t after = bytes_ - before + key.size() + value->size();
  MANIPLE_REQUIRE(after <= quota_.bytes, "the store is full: {} bytes with key {}, at most {} are allowed", after,
                  printable(key), quota_.bytes);
  if (found != values_.end()) {
    found->second = std::move(value);
  } else {
    MANIPLE_REQUIRE(values_.size() < quota_.keys, "the store is full: it has {} keys, no more are allowed",
                    values_.size());
    values_.emplace(std::string(key), std::move(value));
  }
  bytes_ = after;
}

Value KeyTable::find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : found->second;
}

std::int64_t KeyTable::add(std::string_view key, std::int64_t delta) {
  const Value value = find(key);
  const std::int64_t sum = sum_of(key, value.get(), delta);
  set(key, std::make_shared<const std::string>(std::to_string(sum)));
  return sum;
}

KeyTable::Swap KeyTable::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  require_key(key);
  const auto found = values_.find(key);
  const bool matches = found == values_.end() ? expected.empty() : *found->second == expected;
  if (matches) {
    auto value = std::make_shared<const std::string>(desired);
    const std::string_view now = *value;
    set(key, std::move(value));
    return {true, now};
  }
  return {false, found == values_.end() ? expected : std::string_view(*found->second)};
}

bool KeyTable::erase(std::string_view key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  bytes_ -= found->first.size() + found->second->size();
  values_.erase(found);
  return true;
}

}  // namespace maniple
