#include "tools/bench/report.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace maniple::bench {
namespace {

Row row_of(const std::string& backend, const std::string& buffer, int ranks, std::uint64_t bytes, double median_us) {
  Row row;
  row.op = "all_reduce";
  row.backend = backend;
  row.transport = "shm";
  row.buffer = buffer;
  row.ranks = ranks;
  row.bytes = bytes;
  row.median_us = median_us;
  row.p99_us = median_us * 1.2;
  row.dtype = "float32";
  row.algorithm = "auto";
  set_bandwidth(row);
  return row;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(Table, FitsInto80ColumnsAndIsAligned) {
  Row widest = row_of("openmpi", "registered", 256, 256 << 20, 123'456);
  widest.op = "reduce_scatter";
  widest.transport = "shm+tcp";
  const auto lines = lines_of(table({widest, row_of("native", "registered", 2, 4, 0.4)}));
  for (const std::string& line : lines) EXPECT_LE(line.size(), 80u) << line;
  ASSERT_GE(lines.size(), 3u);
  EXPECT_EQ(lines[1], "-- reduce_scatter, 256 ranks, float32");
  EXPECT_EQ(lines[0].find("bytes") + 5, lines[2].find("256 MiB") + 7);
  EXPECT_EQ(lines[0].find("median") + 6, lines[2].find("123 ms") + 6);
}

TEST(Table, WithOtherBackendsItFitsToo) {
  for (const std::string& line : lines_of(table({row_of("maniple-gloo", "registered", 2, 256 << 20, 123'456)}))) {
    EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST(Table, RatioIsSpeedAgainstOpenMpiOfTheSameCase) {
  const std::vector<Row> rows = {row_of("native", "registered", 2, 1 << 20, 100),
                                 row_of("openmpi", "ordinary", 2, 1 << 20, 500),
                                 row_of("native", "registered", 4, 1 << 20, 100)};
  EXPECT_DOUBLE_EQ(speed_against(rows[0], rows, "openmpi"), 5);
  EXPECT_DOUBLE_EQ(speed_against(rows[1], rows, "openmpi"), 1);
  EXPECT_DOUBLE_EQ(speed_against(rows[2], rows, "openmpi"), 0) << "other ranks are another case";
  EXPECT_NE(table(rows).find("5.00x"), std::string::npos);
}

TEST(Table, WithoutOpenMpiThereIsNoRatio) {
  EXPECT_EQ(table({row_of("native", "registered", 2, 4, 1)}).find("openmpi"), std::string::npos);
}

TEST(Table, ErrorsStandWhereFiguresWould) {
  Row row = row_of("native", "ordinary", 2, 4, 0);
  row.error = "wrong result: 3 of the checked elements on the worst rank";
  EXPECT_NE(table({row}).find("error: wrong result"), std::string::npos);
}

TEST(Table, SaysWhatTheColumnsDoNot) {
  Row row = row_of("native", "ordinary", 2, 4, 1);
  row.dtype = "float16";
  row.algorithm = "ring";
  row.hosts = 2;
  row.link = "1gbit";
  EXPECT_NE(table({row}).find("-- all_reduce, 2 ranks, float16, algorithm ring, 2 hosts, links of 1gbit\n"),
            std::string::npos);
  row.busy = 2;
  EXPECT_NE(table({row}).find("links of 1gbit, with 2 busy processes\n"), std::string::npos);
  row.rewritten = true;
  EXPECT_NE(table({row}).find("with 2 busy processes, inputs rewritten\n"), std::string::npos);
}

}  // namespace
}  // namespace maniple::bench
