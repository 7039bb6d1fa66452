#include "comm/base/format.h"

#include <algorithm>
#include <cstdint>

#include <fmt/args.h>
#include <fmt/format.h>

namespace maniple {

std::string format_values(std::string_view pattern, std::span<const FormatValue> values) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  store.reserve(values.size(), 0);
  for (const FormatValue& value : values) {
    switch (value.kind) {
      case FormatValue::Kind::boolean: store.push_back(value.integer != 0); break;
      case FormatValue::Kind::character: store.push_back(static_cast<char>(value.integer)); break;
      case FormatValue::Kind::integer: store.push_back(static_cast<long long>(value.integer)); break;
      case FormatValue::Kind::natural: store.push_back(static_cast<unsigned long long>(value.natural)); break;
      case FormatValue::Kind::real32: store.push_back(static_cast<float>(value.real)); break;
      case FormatValue::Kind::real64: store.push_back(value.real); break;
      case FormatValue::Kind::text: store.push_back(fmt::string_view(value.text.data(), value.text.size())); break;
    }
  }
  return fmt::vformat(fmt::string_view(pattern.data(), pattern.size()), store);
}

namespace {

struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 0;  ///< 0: the first byte does not begin a character
};

Character first_of(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  if (lead < 0x80) return {lead, 1};
  const std::size_t length = lead >= 0xf0 && lead <= 0xf4  ? 4
                             : lead >= 0xe0 && lead < 0xf0 ? 3
                             : lead >= 0xc2 && lead < 0xe0 ? 2
                                                           : 0;
  if (length == 0 || text.size() < length) return {};
  std::uint32_t code = lead & (0x7fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    const auto next = static_cast<unsigned char>(text[i]);
    if ((next & 0xc0) != 0x80) return {};
    code = code << 6 | (next & 0x3f);
  }
  constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kLeast[length] || code > 0x10ffff || surrogate) return {};
  return {code, length};
}

template <class Each>
void for_each_character(std::string_view text, Each each) {
  while (!text.empty()) {
    const Character character = first_of(text);
    const std::size_t bytes = std::max<std::size_t>(1, character.bytes);
    if (!each(character, text.substr(0, bytes))) return;
    text.remove_prefix(bytes);
  }
}

struct Range {
  std::uint32_t first, last;
};
constexpr Range kNoColumn[] = {{0x300, 0x36f},     {0x483, 0x489},    {0x591, 0x5bd},   {0x64b, 0x65f},
                               {0x1ab0, 0x1aff},   {0x1dc0, 0x1dff},  {0x200b, 0x200f}, {0x2060, 0x2064},
                               {0x20d0, 0x20ff},   {0xfe00, 0xfe0f},  {0xfe20, 0xfe2f}, {0xfeff, 0xfeff},
                               {0x1f3fb, 0x1f3ff}, {0xe0100, 0xe01ef}};
constexpr Range kTwoColumns[] = {{0x1100, 0x115f},   {0x231a, 0x231b},   {0x23e9, 0x23ec},   {0x2614, 0x2615},
                                 {0x26a1, 0x26a1},   {0x2705, 0x2705},   {0x274c, 0x274c},   {0x2753, 0x2757},
                                 {0x2b50, 0x2b50},   {0x2e80, 0x303e},   {0x3041, 0xa4cf},   {0xa960, 0xa97c},
                                 {0xac00, 0xd7a3},   {0xf900, 0xfaff},   {0xfe30, 0xfe6f},   {0xff01, 0xff60},
                                 {0xffe0, 0xffe6},   {0x1f300, 0x1f64f}, {0x1f680, 0x1f6ff}, {0x1f7e0, 0x1f7eb},
                                 {0x1f900, 0x1f9ff}, {0x1fa70, 0x1faff}, {0x20000, 0x3fffd}};

template <std::size_t n>
bool is_in(const Range (&ranges)[n], std::uint32_t code) {
  return std::any_of(ranges, ranges + n, [&](Range range) { return code >= range.first && code <= range.last; });
}

std::size_t columns_of(Character character) {
  if (character.bytes == 1) return 1;
  return is_in(kNoColumn, character.code) ? 0 : is_in(kTwoColumns, character.code) ? 2 : 1;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string result;
  for_each_character(text, [&](Character character, std::string_view bytes) {
    result += character.bytes == 0 ? "?" : bytes;
    return true;
  });
  return result;
}

std::string one_line(std::string_view text) {
  std::string result;
  for_each_character(text, [&](Character character, std::string_view bytes) {
    const bool control = character.code < 0x20 || (character.code >= 0x7f && character.code < 0xa0);
    result += character.bytes == 0 ? "?" : control ? " " : bytes;
    return true;
  });
  return result;
}

std::size_t columns_of(std::string_view text) {
  std::size_t columns = 0;
  for_each_character(text, [&](Character character, std::string_view) {
    columns += columns_of(character);
    return true;
  });
  return columns;
}

std::string cut_to_columns(std::string_view text, std::size_t columns) {
  if (columns_of(text) <= columns) return std::string(text);
  std::string result;
  if (columns == 0) return result;
  std::size_t taken = 0;
  for_each_character(text, [&](Character character, std::string_view bytes) {
    taken += columns_of(character);
    if (taken > columns - 1) return false;
    result += bytes;
    return true;
  });
  return result + "~";
}

}  // namespace maniple
