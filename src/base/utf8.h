// Texts for terminals and for formats that insist on UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace maniple {

/// The text with every byte that belongs to no UTF-8 character replaced by "?".
std::string valid_utf8(std::string_view text);

/// The same, with control characters (line ends, escapes) replaced by spaces: it cannot move the cursor.
std::string one_line(std::string_view text);

/// How many columns of a terminal a text from one_line takes: East Asian characters and emoji take two, combining marks none.
std::size_t columns_of(std::string_view text);

/// As much of its beginning as fits; a text that does not fit ends with "~", where there is a column.
std::string cut_to_columns(std::string_view text, std::size_t columns);

}  // namespace maniple
