#include "bench/row.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "bench/report.h"
#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

Row sample() {
  Row row;
  row.op = "all_reduce";
  row.backend = "native";
  row.transport = "shm";
  row.buffer = "registered";
  row.ranks = 4;
  row.bytes = 1 << 20;
  row.median_us = 100;
  row.p99_us = 150;
  row.dtype = "float32";
  row.algorithm = "auto";
  set_bandwidth(row);
  return row;
}

TEST(Row, BandwidthIsBytesByMedianIn1e9) {
  EXPECT_NEAR(sample().algbw_gbps, 10.48576, 1e-9);
  EXPECT_NEAR(sample().busbw_gbps, 10.48576 * 1.5, 1e-9);
}

TEST(Row, SurvivesTheWayThroughALine) {
  const auto back = parse_row_line(to_line(sample()));
  ASSERT_TRUE(back);
  EXPECT_EQ(to_line(*back), to_line(sample()));
}

TEST(Row, OtherOutputIsNoRow) {
  EXPECT_FALSE(parse_row_line(""));
  EXPECT_FALSE(parse_row_line("WARNING: there was an error initializing a device"));
  EXPECT_FALSE(parse_row_line("{not json"));
  EXPECT_FALSE(parse_row_line("{\"other\": 1}"));
  EXPECT_THROW(parse_row_line("{\"median_us\": 1}"), ProtocolError) << "a row that lacks fields is a bug, not noise";
}

TEST(Row, MergeTakesTheMedianOfMedians) {
  Row slow = sample(), fast = sample(), middle = sample();
  slow.median_us = 1000;
  fast.median_us = 50;
  middle.p99_us = 200;
  const Row merged = merge({slow, fast, middle});
  EXPECT_EQ(merged.median_us, 100);
  EXPECT_EQ(merged.p99_us, 150);
  EXPECT_NEAR(merged.algbw_gbps, 10.48576, 1e-9);
  middle.error = "wrong result";
  EXPECT_EQ(merge({slow, fast, middle}).error, "wrong result");
}

TEST(Report, HasMachineAndRows) {
  const auto report = nlohmann::json::parse(report_text(this_machine(), {sample()}));
  for (const char* key : {"cpu", "cores", "arch", "kernel"}) EXPECT_TRUE(report["machine"].contains(key)) << key;
  EXPECT_GT(report["machine"]["cores"].get<int>(), 0);
  ASSERT_EQ(report["rows"].size(), 1u);
  for (const char* key : {"op", "backend", "transport", "buffer", "ranks", "bytes", "median_us", "p99_us", "algbw_gbps",
                          "busbw_gbps", "dtype", "algorithm"}) {
    EXPECT_TRUE(report["rows"][0].contains(key)) << key;
  }
}

TEST(Report, CsvHasOneLineForEachRowAndQuotesErrors) {
  Row wrong = sample();
  wrong.error = "no \"ring\", here";
  const std::string text = csv_text({sample(), wrong});
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  EXPECT_EQ(text.find("op,backend,"), 0u);
  EXPECT_NE(text.find("\nall_reduce,native,shm,registered,4,1048576,100,150,"), std::string::npos) << text;
  EXPECT_NE(text.find(",\"no \"\"ring\"\", here\"\n"), std::string::npos) << text;
}

TEST(Report, AFileThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(write_file("/nonexistent/file.json", "x"), SystemError);
}

}  // namespace
}  // namespace maniple::bench
