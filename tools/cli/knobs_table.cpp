#include "tools/cli/command.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace maniple::cli {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kIndent = 4;
constexpr std::size_t kLeastMeaning = 40;  // a narrower column is hard to read

struct Row {
  std::string variable, value, values, meaning;
};

std::vector<Row> rows_of(const ReadVariable& read) {
  std::vector<Row> rows = {{"variable", "default", "values", "meaning"}};
  for (const KnobInfo& knob : knobs()) {
    std::string meaning = described(knob);
    if (const auto set = read(knob.name))
      meaning += fmt::format(" [now {}{}]", shown(*set), is_permitted(knob.permitted, *set) ? "" : ": not permitted");
    rows.push_back(
        {knob.name, *knob.default_text == '\0' ? "-" : knob.default_text, to_string(knob.permitted), meaning});
  }
  return rows;
}

// Breaks the text at blanks into lines of at most `width` columns; a longer word gets a line of its own.
std::vector<std::string> broken(std::string_view text, std::size_t width) {
  std::vector<std::string> lines;
  while (text.size() > width) {
    auto blank = text.rfind(' ', width);
    if (blank == std::string_view::npos) blank = text.find(' ');
    if (blank == std::string_view::npos) break;
    lines.emplace_back(text.substr(0, blank));
    text.remove_prefix(blank + 1);
  }
  lines.emplace_back(text);
  return lines;
}

}  // namespace

std::string knobs_table(const ReadVariable& read, std::size_t width) {
  const std::vector<Row> rows = rows_of(read);
  std::size_t name_width = 0, value_width = 0, values_width = 0;
  for (const Row& row : rows) {
    name_width = std::max(name_width, row.variable.size());
    value_width = std::max(value_width, row.value.size());
    values_width = std::max(values_width, row.values.size());
  }
  const std::size_t left = name_width + kGap + value_width + kGap + values_width + kGap;
  const bool beside = width == 0 || width >= left + kLeastMeaning;
  std::string text;
  for (const Row& row : rows) {
    text += fmt::format("{:<{}}  {:<{}}  ", row.variable, name_width, row.value, value_width);
    std::vector<std::string> lines;
    std::size_t indent = kIndent;
    if (beside) {
      lines = width == 0 ? std::vector{row.meaning} : broken(row.meaning, width - left);
      text += fmt::format("{:<{}}  {}", row.values, values_width, lines.front());
      lines.erase(lines.begin());
      indent = left;
    } else {
      text += row.values;
      lines = broken(row.meaning, std::max(width, kIndent + kLeastMeaning) - kIndent);
    }
    text += '\n';
    for (const std::string& line : lines) text += fmt::format("{:{}}{}\n", "", indent, line);
  }
  return text;
}

}  // namespace maniple::cli
