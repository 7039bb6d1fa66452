#include "tools/cli/command.h"

#include <gtest/gtest.h>

#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace maniple::cli {
namespace {

std::optional<std::string> nothing(const char*) { return std::nullopt; }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(KnobsTable, FitsATerminal) {
  for (const std::size_t width : {80, 100, 109, 110, 120, 200}) {
    for (const std::string& line : lines_of(knobs_table(nothing, width))) {
      EXPECT_LE(line.size(), width) << line;
      EXPECT_FALSE(line.empty() || line.back() == ' ') << '"' << line << '"';
    }
  }
}

TEST(KnobsTable, NoWordIsLostAtAnyWidth) {
  const auto words = [](std::size_t width) {
    std::istringstream in(knobs_table(nothing, width));
    return std::vector<std::string>(std::istream_iterator<std::string>(in), {});
  };
  for (std::size_t width = 1; width < 220; ++width) EXPECT_EQ(words(width), words(0)) << width;
}

TEST(KnobsTable, PrintsOneLinePerKnobWithoutATerminal) {
  const auto lines = lines_of(knobs_table(nothing, 0));
  ASSERT_EQ(lines.size(), knobs().size() + 1);
  const std::size_t column = lines[0].find("meaning");
  for (std::size_t i = 0; i < knobs().size(); ++i) {
    EXPECT_EQ(lines[i + 1].rfind(knobs()[i].name, 0), 0u);
    EXPECT_EQ(lines[i + 1].substr(column), described(knobs()[i]));
  }
}

TEST(KnobsTable, ColumnsAreAligned) {
  const auto wide = lines_of(knobs_table(nothing, 120));
  const std::size_t values = wide[0].find("values"), meaning = wide[0].find("meaning");
  for (const std::string& line : wide) {
    EXPECT_EQ(line.substr(meaning - 2, 2), "  ") << line;
    EXPECT_NE(line[meaning], ' ') << line;
    if (line[0] != ' ') {
      EXPECT_NE(line[values], ' ') << line;
    }
  }
  for (const std::string& line : lines_of(knobs_table(nothing, 80))) {
    if (line[0] == ' ') {
      EXPECT_EQ(line.find_first_not_of(' '), 4u) << line;
    } else {
      EXPECT_EQ(line.substr(values - 2, 2), "  ") << line;
      EXPECT_NE(line[values], ' ') << line;
    }
  }
}

TEST(KnobsTable, ShowsWhatIsSet) {
  const auto set = [](const char* name) -> std::optional<std::string> {
    if (std::string(name) == "MANIPLE_TCP_STREAMS") return "99";
    if (std::string(name) == "MANIPLE_LOG") return "info";
    return std::nullopt;
  };
  const std::string text = knobs_table(set, 0);
  EXPECT_NE(text.find("connections between two ranks [now 99: not permitted]\n"), std::string::npos) << text;
  EXPECT_NE(text.find("least important lines shown [now info]\n"), std::string::npos) << text;
}

}  // namespace
}  // namespace maniple::cli
