// Rows and tables of `maniple bench ddp`, without running anything.
#include "tools/bench/ddp_bench.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace maniple::bench {
namespace {

const std::string kLine =
    R"({"system": "maniple", "model": "tiny50", "ranks": 2, "nosync_ms": 1.5, "ddp_ms": 2.0, "efficiency": 0.75, )"
    R"("peak_rss_mb": 123.25, "overlap": "none"})";

TEST(DdpBench, ReadsARow) {
  const DdpRow row = parse_ddp_row(kLine);
  EXPECT_EQ(row.system, "maniple");
  EXPECT_EQ(row.model, "tiny50");
  EXPECT_EQ(row.ranks, 2);
  EXPECT_DOUBLE_EQ(row.nosync_ms, 1.5);
  EXPECT_DOUBLE_EQ(row.ddp_ms, 2.0);
  EXPECT_DOUBLE_EQ(row.efficiency, 0.75);
  EXPECT_DOUBLE_EQ(row.peak_rss_mb, 123.25);
  EXPECT_EQ(row.overlap, "none");
}

TEST(DdpBench, WholeNumbersAreNumbersToo) {
  EXPECT_DOUBLE_EQ(parse_ddp_row(R"({"system":"torch","model":"m","ranks":4,"nosync_ms":1,"ddp_ms":2,"efficiency":1,)"
                                 R"("peak_rss_mb":0,"overlap":"thread","more":"is ignored"})")
                       .ddp_ms,
                   2);
}

TEST(DdpBench, InvalidRowsAreQuoted) {
  const std::vector<std::string> wrong = {
      "",
      "{",
      "null",
      "[]",
      "Traceback (most recent call last):",
      R"({"system": "maniple"})",
      std::string(kLine).replace(kLine.find("\"ranks\": 2"), 10, "\"ranks\": \"two\""),
      std::string(kLine).replace(kLine.find("2.0"), 3, "null"),
      std::string(kLine).replace(kLine.find("\"maniple\""), 9, "7"),
  };
  for (const std::string& text : wrong) {
    try {
      parse_ddp_row(text);
      ADD_FAILURE() << "accepted " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("not a row of `maniple bench ddp`: " + text), std::string::npos)
          << error.what();
    }
  }
}

TEST(DdpBench, TableIsAlignedAndNarrow) {
  const DdpRow narrow = parse_ddp_row(kLine);
  const DdpRow wide{"torch", "mnist_cnn", 256, 98'765.4321, 123'456.789, 0.8, 54'321.99, "thread"};
  const std::string header = ddp_table_header();
  for (const DdpRow& row : {narrow, wide}) {
    const std::string line = ddp_table_line(row);
    EXPECT_EQ(line.size(), header.size()) << line;
    EXPECT_LE(line.size(), 110u);
    EXPECT_EQ(line.back(), '\n');
  }
  EXPECT_EQ(header, "system    model      ranks   nosync_ms      ddp_ms  efficiency  peak_rss_mb  overlap\n");
  EXPECT_EQ(ddp_table_line(narrow),
            "maniple   tiny50         2       1.500       2.000       0.750        123.2     none\n");
}

TEST(DdpBench, ReportHoldsEveryRowAsItCame) {
  Machine machine;
  machine.cpu = "a \"quoted\" cpu";
  machine.cores = 2;
  const auto report = nlohmann::json::parse(ddp_report_text(machine, {parse_ddp_row(kLine), parse_ddp_row(kLine)}));
  EXPECT_EQ(report.at("machine").at("cpu"), "a \"quoted\" cpu");
  ASSERT_EQ(report.at("rows").size(), 2u);
  const DdpRow again = parse_ddp_row(report.at("rows")[1].dump());
  EXPECT_EQ(ddp_table_line(again), ddp_table_line(parse_ddp_row(kLine)));
  EXPECT_TRUE(nlohmann::json::parse(ddp_report_text(machine, {})).at("rows").empty());
}

TEST(DdpBench, UnknownModelsAreRefused) {
  EXPECT_FALSE(checked_models({}).empty());
  EXPECT_EQ(checked_models({"tiny50"}), std::vector<std::string>{"tiny50"});
  try {
    checked_models({"resnet"});
    ADD_FAILURE() << "there is no such model";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("tiny50"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace maniple::bench
