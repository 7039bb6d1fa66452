#include "bench/case.h"

#include <gtest/gtest.h>

#include "bench/campaign.h"
#include "bench/order.h"
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

TEST(Order, SurvivesTheWayThroughAnArgument) {
  Order order;
  order.op = "reduce";
  order.bytes = {4, std::uint64_t{1} << 33};
  order.algorithm = "ring \"x\"";
  const Order back = parse_order(to_json_text(order));
  EXPECT_EQ(back.op, order.op);
  EXPECT_EQ(back.bytes, order.bytes);
  EXPECT_EQ(back.algorithm, order.algorithm);
  EXPECT_THROW(parse_order("{}"), InvalidArgument);
  EXPECT_THROW(parse_order("nonsense"), InvalidArgument);
}

TEST(Order, SizesThatRoundToTheSameBufferAreOneCase) {
  Order order;
  order.op = "all_gather";
  order.ranks = 4;
  order.bytes = {4, 8, 16, 64};
  EXPECT_EQ(order.cases().size(), 2u);
}

TEST(Plan, ChecksEveryName) {
  Wishes good;
  good.operations = {"all_reduce", "barrier"};
  good.sizes = {4};
  EXPECT_EQ(plan(good).size(), 2u);
  const auto refuses = [&](auto change) {
    Wishes wishes = good;
    change(wishes);
    EXPECT_THROW(plan(wishes), InvalidArgument);
  };
  refuses([](Wishes& w) { w.operations = {"all_reduc"}; });
  refuses([](Wishes& w) { w.operations = {"allocate"}; });
  refuses([](Wishes& w) { w.ranks = {0}; });
  refuses([](Wishes& w) { w.dtypes = {"float12"}; });
  refuses([](Wishes& w) { w.reduce = "mean"; });
  refuses([](Wishes& w) { w.transports = {"pigeon"}; });
  refuses([](Wishes& w) { w.buffers = {"shared"}; });
  refuses([](Wishes& w) { w.algorithms = {"magic"}; });
  refuses([](Wishes& w) { w.hosts = 4; });
  refuses([](Wishes& w) { w.link = "1gbit"; });
}

}  // namespace
}  // namespace maniple::bench
