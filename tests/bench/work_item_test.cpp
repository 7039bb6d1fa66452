#include "bench/work_item.h"

#include <gtest/gtest.h>

#include "bench/runner.h"
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
  const WorkItem back = parse_work_item(to_json_text(item));
  EXPECT_EQ(back.op, item.op);
  EXPECT_EQ(back.bytes, item.bytes);
  EXPECT_EQ(back.algorithm, item.algorithm);
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
}

}  // namespace
}  // namespace maniple::bench
