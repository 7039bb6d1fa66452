#include "comm/base/format.h"

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

TEST(Utf8, WrongBytesAreReplacedRightOnesKept) {
  for (const char* right : {"", "abc", "\u00fc", "\u20ac", "\u65e5\u672c", "\U0001f680", "\u0080", "\u07ff", "\u0800",
                            "\uffff", "\U00010000"}) {
    EXPECT_EQ(valid_utf8(right), right);
  }
  EXPECT_EQ(valid_utf8("a\x80z"), "a?z") << "a byte that continues nothing";
  EXPECT_EQ(valid_utf8("a\xc3"), "a?") << "cut off";
  EXPECT_EQ(valid_utf8("\xe2\x82z"), "??z");
  EXPECT_EQ(valid_utf8("\xc0\xaf"), "??") << "longer than need be";
  EXPECT_EQ(valid_utf8("\xe0\x80\xaf"), "???");
  EXPECT_EQ(valid_utf8("\xed\xa0\x80"), "???") << "half of a surrogate pair";
  EXPECT_EQ(valid_utf8("\xf4\x90\x80\x80"), "????") << "above the last character";
  EXPECT_EQ(valid_utf8("\xff\xfe"), "??");
  EXPECT_EQ(valid_utf8(std::string_view("a\0b", 3)), std::string("a\0b", 3));
}

TEST(Utf8, OneLineCannotMoveTheCursor) {
  EXPECT_EQ(one_line("a\nb\tc\rd\x1b[2Je\x7f"), "a b c d [2Je ");
  EXPECT_EQ(one_line("x\u009by\xff"), "x y?");
}

TEST(Utf8, Columns) {
  EXPECT_EQ(columns_of(""), 0u);
  EXPECT_EQ(columns_of("abc"), 3u);
  EXPECT_EQ(columns_of("gr\u00fc\u00df"), 4u);
  EXPECT_EQ(columns_of("gru\u0308"), 3u) << "a combining mark takes none";
  EXPECT_EQ(columns_of("\u65e5\u672c"), 4u);
  EXPECT_EQ(columns_of("\U0001f680!"), 3u);
}

TEST(Utf8, CutsBetweenCharacters) {
  EXPECT_EQ(cut_to_columns("abcdef", 6), "abcdef");
  EXPECT_EQ(cut_to_columns("abcdef", 5), "abcd~");
  EXPECT_EQ(cut_to_columns("\u65e5\u672c\u8a9e", 5), "\u65e5\u672c~");
  EXPECT_EQ(cut_to_columns("\u65e5\u672c\u8a9e", 4), "\u65e5~") << "half of a character is none";
  EXPECT_EQ(cut_to_columns("abc", 1), "~");
  EXPECT_EQ(cut_to_columns("abc", 0), "");
}

}  // namespace

}  // namespace maniple
