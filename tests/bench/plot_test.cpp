#include "bench/plot.h"

#include <gtest/gtest.h>

#include <regex>

#include "bench/log_axis.h"
#include "bench/rows.h"

namespace maniple::bench {
namespace {

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

std::vector<Row> two_lines() {
  std::vector<Row> rows;
  for (const std::uint64_t bytes : {4, 1024, 1 << 20, 1 << 24}) {
    rows.push_back(row_of("native", "registered", 2, bytes, 0.4 + static_cast<double>(bytes) / 30e3));
    rows.push_back(row_of("openmpi", "ordinary", 2, bytes, 0.5 + static_cast<double>(bytes) / 5e3));
  }
  return rows;
}

TEST(Plot, OneLinePerSeriesInEachPanel) {
  const std::string svg = plot_svg({"Some <CPU>", 2, "aarch64", "6.1", "neon"}, two_lines());
  EXPECT_EQ(count_of(svg, "<polyline"), 4u);
  EXPECT_EQ(count_of(svg, ">Maniple, shm, registered memory<"), 1u);
  EXPECT_EQ(count_of(svg, ">Open MPI, shm<"), 1u);
  EXPECT_EQ(count_of(svg, "Some &lt;CPU&gt;"), 1u) << "text is escaped";
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(Plot, EveryPointLiesInsideThePicture) {
  const std::string svg = plot_svg({}, two_lines());
  const std::regex circle("cx=\"([0-9.]+)\" cy=\"([0-9.]+)\"");
  int points = 0;
  for (std::sregex_iterator it(svg.begin(), svg.end(), circle), end; it != end; ++it, ++points) {
    EXPECT_GT(std::stod((*it)[1]), 0);
    EXPECT_LT(std::stod((*it)[1]), 1120);
  }
  EXPECT_GE(points, 3);
}

TEST(Plot, NothingToDrawIsStillAPicture) {
  Row barrier = row_of("native", "ordinary", 2, 0, 0.3);
  barrier.op = "barrier";
  EXPECT_NE(plot_svg({}, {barrier}).find("</svg>"), std::string::npos);
}

TEST(Plot, ASingleSizeIsDrawnAsBars) {
  const std::string svg =
      plot_svg({}, {row_of("native", "registered", 2, 4, 0.3), row_of("openmpi", "ordinary", 2, 4, 0.6)});
  EXPECT_EQ(count_of(svg, "<polyline"), 0u);
  EXPECT_EQ(count_of(svg, ">0.30<"), 1u);
  EXPECT_EQ(count_of(svg, ">0.60<"), 1u);
}

TEST(Plot, EachNumberOfRanksHasItsChart) {
  const std::string svg =
      plot_svg({}, {row_of("native", "registered", 2, 4, 0.3), row_of("native", "registered", 4, 4, 0.6)});
  EXPECT_EQ(count_of(svg, ">all_reduce of float32, 2 ranks<"), 1u);
  EXPECT_EQ(count_of(svg, ">all_reduce of float32, 4 ranks<"), 1u);
}

TEST(LogAxis, EqualFactorsAreEqualDistances) {
  const LogAxis axis(1, 10'000, 0, 400);
  EXPECT_DOUBLE_EQ(axis.at(1), 0);
  EXPECT_NEAR(axis.at(10), 100, 1e-9);
  EXPECT_NEAR(axis.at(10'000), 400, 1e-9);
  EXPECT_EQ(axis.decimal_ticks().size(), 5u);
  EXPECT_EQ(LogAxis(4, 1 << 20, 0, 400).binary_ticks(10),
            (std::vector<double>{4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576}));
}

}  // namespace
}  // namespace maniple::bench
