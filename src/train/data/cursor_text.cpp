#include "train/data/cursor_text.h"

#include <charconv>

#include "base/format.h"

namespace maniple {
namespace {

/// Takes `words` and the number behind them from the front of the text.
bool take(std::string_view& text, std::string_view words, std::uint64_t& number) {
  if (text.substr(0, words.size()) != words) return false;
  text.remove_prefix(words.size());
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

}  // namespace

std::string write_cursor(const SavedCursor& cursor) {
  return format_text("epoch {}, place {} of {}, shuffle {}, seed {}", cursor.epoch, cursor.places, cursor.size,
                     cursor.shuffle ? 1 : 0, cursor.seed);
}

std::optional<SavedCursor> read_cursor(std::string_view text) {
  SavedCursor cursor;
  std::uint64_t shuffle = 0;
  const bool whole = take(text, "epoch ", cursor.epoch) && take(text, ", place ", cursor.places) &&
                     take(text, " of ", cursor.size) && take(text, ", shuffle ", shuffle) &&
                     take(text, ", seed ", cursor.seed) && text.empty();
  if (!whole || shuffle > 1 || cursor.places > cursor.size) return std::nullopt;
  cursor.shuffle = shuffle == 1;
  return cursor;
}

}  // namespace maniple
