#include "bench/sizes.h"

#include <gtest/gtest.h>

#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

using Sizes = std::vector<std::uint64_t>;

TEST(Sizes, ListsSuffixesAndRanges) {
  EXPECT_EQ(parse_sizes("4"), Sizes{4});
  EXPECT_EQ(parse_sizes("4,1K,3M,1G"), (Sizes{4, 1024, 3 << 20, 1 << 30}));
  EXPECT_EQ(parse_sizes("4..256"), (Sizes{4, 16, 64, 256}));
  EXPECT_EQ(parse_sizes("4..100"), (Sizes{4, 16, 64, 100})) << "the end belongs to the range, in step or not";
  EXPECT_EQ(parse_sizes("8,1K..4K"), (Sizes{8, 1024, 4096}));
}

TEST(Sizes, RefusesWhatIsNoSize) {
  for (const char* text : {"", ",", "0", "-4", "4X", "K", "4..", "..4", "8..4", "2000000000G", "1.5M", "4 K"}) {
    EXPECT_THROW(parse_sizes(text), InvalidArgument) << text;
  }
}

TEST(Sizes, ErrorsNameTheWrongPart) {
  try {
    parse_sizes("4,12Q,8");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("\"12Q\""), std::string::npos) << error.what();
  }
}

TEST(Format, ReadsAsPeopleWriteIt) {
  EXPECT_EQ(format_bytes(4), "4 B");
  EXPECT_EQ(format_bytes(1024), "1 KiB");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(256 << 20), "256 MiB");
  EXPECT_EQ(format_time(0.413), "0.41 us");
  EXPECT_EQ(format_time(9.996), "10.0 us");
  EXPECT_EQ(format_time(99.96), "100 us");
  EXPECT_EQ(format_time(999.6), "1.00 ms");
  EXPECT_EQ(format_time(2.5e6), "2.50 s");
  EXPECT_EQ(format_bandwidth(38.12), "38.1 GB/s");
  EXPECT_EQ(format_bandwidth(0.0087), "8.70 MB/s");
}

}  // namespace
}  // namespace maniple::bench
