// A sampler's cursor as one line of text, with what its place depends on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

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

std::string write_cursor(const SavedCursor& cursor);

/// Nothing when the text is not exactly of that form, or its place is behind its end.
std::optional<SavedCursor> read_cursor(std::string_view text);

}  // namespace maniple
