#include "store/key_table.h"

#include <charconv>

#include "base/check.h"

namespace maniple {

std::int64_t sum_of(std::string_view key, const std::string* value, std::int64_t delta) {
  std::int64_t number = 0;
  if (value != nullptr) {
    const char* last = value->data() + value->size();
    const auto [end, error] = std::from_chars(value->data(), last, number);
    MANIPLE_REQUIRE(error == std::errc() && end == last, "add to store key {}: it holds {}, which is no whole number",
                    printable(key), printable(*value));
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
