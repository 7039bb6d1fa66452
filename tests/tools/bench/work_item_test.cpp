#include "tools/bench/work_item.h"

#include <algorithm>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tools/bench/report.h"
#include "tools/bench/runner.h"
#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

TEST(Case, PartsHoldAtLeastOneElement) {
  const Case small = Case::of(Op::all_gather, DType::float32, ReduceOp::sum, 3, 4);
  EXPECT_EQ(small.bytes(), 12u);
  EXPECT_EQ(small.part(), 1u);
  const Case uneven = Case::of(Op::reduce_scatter, DType::float64, ReduceOp::sum, 3, 100);
  EXPECT_EQ(uneven.bytes(), 96u);
  EXPECT_EQ(Case::of(Op::all_reduce, DType::float32, ReduceOp::sum, 3, 100).bytes(), 100u);
}

TEST(Case, BusFactorsAreThoseOfNcclTests) {
  EXPECT_DOUBLE_EQ(bus_factor(Op::all_reduce, 4), 1.5);
  for (const Op op : {Op::all_gather, Op::reduce_scatter, Op::all_to_all, Op::gather, Op::scatter}) {
    EXPECT_DOUBLE_EQ(bus_factor(op, 4), 0.75);
  }
  for (const Op op : {Op::broadcast, Op::reduce, Op::send}) EXPECT_DOUBLE_EQ(bus_factor(op, 4), 1);
}

TEST(WorkItem, SurvivesTheWayThroughAnArgument) {
  WorkItem item;
  item.op = "reduce";
  item.bytes = {4, std::uint64_t{1} << 33};
  item.algorithm = "ring \"x\"";
  item.rewrite = true;
  const WorkItem back = parse_work_item(to_json_text(item));
  EXPECT_EQ(back.op, item.op);
  EXPECT_EQ(back.bytes, item.bytes);
  EXPECT_EQ(back.algorithm, item.algorithm);
  EXPECT_TRUE(back.rewrite);
  EXPECT_THROW(parse_work_item("{}"), InvalidArgument);
  EXPECT_THROW(parse_work_item("nonsense"), InvalidArgument);
}

TEST(WorkItem, SizesThatRoundToTheSameBufferAreOneCase) {
  WorkItem item;
  item.op = "all_gather";
  item.ranks = 4;
  item.bytes = {4, 8, 16, 64};
  EXPECT_EQ(item.cases().size(), 2u);
}

TEST(PlanBlocks, ChecksEveryName) {
  BenchRequest good;
  good.operations = {"all_reduce", "barrier"};
  good.sizes = {4};
  EXPECT_EQ(plan_blocks(good).size(), 2u);
  const auto refuses = [&](auto change) {
    BenchRequest request = good;
    change(request);
    EXPECT_THROW(plan_blocks(request), InvalidArgument);
  };
  refuses([](BenchRequest& w) { w.operations = {"all_reduc"}; });
  refuses([](BenchRequest& w) { w.operations = {"allocate"}; });
  refuses([](BenchRequest& w) { w.ranks = {0}; });
  refuses([](BenchRequest& w) { w.dtypes = {"float12"}; });
  refuses([](BenchRequest& w) { w.reduce = "mean"; });
  refuses([](BenchRequest& w) { w.transports = {"pigeon"}; });
  refuses([](BenchRequest& w) { w.buffers = {"shared"}; });
  refuses([](BenchRequest& w) { w.algorithms = {"magic"}; });
  refuses([](BenchRequest& w) { w.hosts = 4; });
  refuses([](BenchRequest& w) { w.link = "1gbit"; });
  refuses([](BenchRequest& w) { w.busy = -1; });
}

Row sample() {
  Row row;
  row.op = "all_reduce";
  row.backend = "native";
  row.transport = "shm";
  row.buffer = "registered";
  row.ranks = 4;
  row.bytes = 1 << 20;
  row.median_us = 100;
  row.mean_us = 110;
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

TEST(Row, OtherOutputIsNotARow) {
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
  fast.mean_us = 90;
  middle.p99_us = 200;
  const Row merged = merge({slow, fast, middle});
  EXPECT_EQ(merged.median_us, 100);
  EXPECT_EQ(merged.mean_us, 110);
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
  for (const char* key : {"op", "backend", "transport", "buffer", "ranks", "bytes", "median_us", "mean_us", "p99_us",
                          "algbw_gbps", "busbw_gbps", "dtype", "algorithm"}) {
    EXPECT_TRUE(report["rows"][0].contains(key)) << key;
  }
}

TEST(Report, CsvHasOneLineForEachRowAndQuotesErrors) {
  Row wrong = sample();
  wrong.error = "no \"ring\", here";
  const std::string text = csv_text({sample(), wrong});
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  EXPECT_EQ(text.find("op,backend,"), 0u);
  EXPECT_NE(text.find("\nall_reduce,native,shm,registered,4,1048576,100,110,150,"), std::string::npos) << text;
  EXPECT_NE(text.find(",\"no \"\"ring\"\", here\"\n"), std::string::npos) << text;
}

TEST(Report, AFileThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(write_file("/nonexistent/file.json", "x"), SystemError);
}

using Sizes = std::vector<std::uint64_t>;

TEST(Sizes, ListsSuffixesAndRanges) {
  EXPECT_EQ(parse_sizes("4"), Sizes{4});
  EXPECT_EQ(parse_sizes("4,1K,3M,1G"), (Sizes{4, 1024, 3 << 20, 1 << 30}));
  EXPECT_EQ(parse_sizes("4..256"), (Sizes{4, 16, 64, 256}));
  EXPECT_EQ(parse_sizes("4..100"), (Sizes{4, 16, 64, 100})) << "the end belongs to the range, in step or not";
  EXPECT_EQ(parse_sizes("8,1K..4K"), (Sizes{8, 1024, 4096}));
}

TEST(Sizes, RefusesInvalidSizes) {
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

TEST(Format, BytesAndTimesHaveReadableUnits) {
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
