#include "base/format.h"

#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace maniple {
namespace {

TEST(Format, KindsOfValues) {
  const std::string text = "text";
  EXPECT_EQ(format_text("{} {} {} {}", text, std::string_view("view"), "literal", 'c'), "text view literal c");
  EXPECT_EQ(format_text("{} {} {}", true, std::numeric_limits<std::int64_t>::min(),
                        std::numeric_limits<std::uint64_t>::max()),
            "true -9223372036854775808 18446744073709551615");
  EXPECT_EQ(format_text("{} {} {}", 0.1, 0.1f, static_cast<unsigned char>(7)), "0.1 0.1 7");
}

TEST(Format, Specifications) {
  EXPECT_EQ(format_text("{:.2f}|{:>6}|{:<6}|{:08x}|{:+d}", 2.0 / 3, "ab", "cd", 255u, 5),
            "0.67|    ab|cd    |000000ff|+5");
  EXPECT_EQ(format_text("{:>{}}|{:.{}f}", "ab", 4, 1.25, 1), "  ab|1.2");
}

TEST(Format, BracesAndNoValues) {
  EXPECT_EQ(format_text("none"), "none");
  EXPECT_EQ(format_text("{{{}}}", 1), "{1}");
}

TEST(Format, Joined) {
  EXPECT_EQ(joined(std::vector<int>{}), "");
  EXPECT_EQ(joined(std::vector<std::int64_t>{2, 3}), "2, 3");
  EXPECT_EQ(joined(std::vector<std::string>{"a", "b", "c"}, "; "), "a; b; c");
}

}  // namespace
}  // namespace maniple
