#include "comm/store/key_table.h"

#include <gtest/gtest.h>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

Value value(std::size_t bytes) { return std::make_shared<const std::string>(bytes, 'v'); }

TEST(KeyTable, TheQuotaOfBytesCountsKeysAndValuesAndReplacements) {
  KeyTable table({.keys = 10, .bytes = 20});
  table.set("abcd", value(6));   // 10
  table.set("abcd", value(16));  // 20: the old value no longer counts
  EXPECT_THROW(table.set("x", value(0)), InvalidArgument);
  EXPECT_EQ(table.find("x"), nullptr);
  EXPECT_TRUE(table.erase("abcd"));
  table.set("x", value(19));
  EXPECT_THROW(table.set("x", value(20)), InvalidArgument);
  EXPECT_EQ(table.find("x")->size(), 19u);
}

TEST(KeyTable, TheQuotaOfKeys) {
  KeyTable table({.keys = 2});
  table.set("a", value(1));
  table.add("b", 1);
  EXPECT_THROW(table.set("c", value(1)), InvalidArgument);
  EXPECT_THROW(table.add("c", 1), InvalidArgument);
  EXPECT_THROW(table.compare_set("c", "", "x"), InvalidArgument);
  table.set("a", value(2));
  table.erase("b");
  table.set("c", value(1));
  EXPECT_EQ(table.size(), 2u);
}

TEST(Limits, KeysInMessagesAreHarmless) {
  EXPECT_EQ(printable("plain/key 1"), "\"plain/key 1\"");
  EXPECT_EQ(printable(std::string_view("\0\n\"\xc3", 4)), "\"\\x00\\x0a\\x22\\xc3\"");
  EXPECT_LT(printable(std::string(1000, 'k')).size(), 100u);
}

TEST(Limits, ManyMissingKeysAreCounted) {
  const std::vector<std::string> keys(1000, "k");
  const std::string text = missing_keys_text(keys, std::vector<bool>(1000, false), 1.5);
  EXPECT_NE(text.find("1000 of 1000 keys missing"), std::string::npos);
  EXPECT_NE(text.find("and 984 more"), std::string::npos);
  EXPECT_LT(text.size(), 500u);
}

}  // namespace
}  // namespace maniple
