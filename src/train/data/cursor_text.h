// A sampler's cursor as one line of text, including the settings on which its place depends.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/base/format.h"

namespace maniple {

struct SavedCursor {
  std::uint64_t epoch = 0;
  std::uint64_t places = 0;
  std::uint64_t size = 0;  ///< of the dataset
  bool shuffle = false;
  std::uint64_t seed = 0;
  bool operator==(const SavedCursor&) const = default;
};

inline constexpr const char* kCursorForm = "\"epoch 3, place 512 of 60000, shuffle 1, seed 7\"";

inline std::string write_cursor(const SavedCursor& cursor) {
  return format_text("epoch {}, place {} of {}, shuffle {}, seed {}", cursor.epoch, cursor.places, cursor.size,
                     cursor.shuffle ? 1 : 0, cursor.seed);
}

/// Removes `words` and the number after them from the front of the text.
inline bool take_number(std::string_view& text, std::string_view words, std::uint64_t& number) {
  if (text.substr(0, words.size()) != words) return false;
  text.remove_prefix(words.size());
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return false;
  text.remove_prefix(end - text.data());
  return true;
}

/// Nullopt unless the text has exactly that form and its place is not beyond the dataset.
inline std::optional<SavedCursor> read_cursor(std::string_view text) {
  SavedCursor cursor;
  std::uint64_t shuffle = 0;
  const bool whole = take_number(text, "epoch ", cursor.epoch) && take_number(text, ", place ", cursor.places) &&
                     take_number(text, " of ", cursor.size) && take_number(text, ", shuffle ", shuffle) &&
                     take_number(text, ", seed ", cursor.seed) && text.empty();
  if (!whole || shuffle > 1 || cursor.places > cursor.size) return std::nullopt;
  cursor.shuffle = shuffle == 1;
  return cursor;
}

}  // namespace maniple
