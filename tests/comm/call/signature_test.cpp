#include "comm/call/signature.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace maniple {
namespace {

Operation operation(Op op, std::uint64_t seq, DType dtype, std::size_t count) {
  Operation result;
  result.op = op;
  result.seq = seq;
  result.dtype = dtype;
  result.count = count;
  return result;
}

TEST(MismatchOf, ListsTheCallsAsTextAndAsFields) {
  const std::vector<RankCall> calls = {{.rank = 0, .call = "all_reduce #3 int32[1] sum", .place = "a.cpp:7"},
                                       {.rank = 2, .call = "barrier #3"}};
  const ErrorInfo info = mismatch_of(calls);
  EXPECT_EQ(info.kind, ErrorKind::mismatch);
  EXPECT_EQ(info.calls, calls);
  EXPECT_EQ(info.reason,
            "ranks called different things: rank 0: all_reduce #3 int32[1] sum at a.cpp:7; rank 2: barrier #3");
}

TEST(Signature, DescribesTheCall) {
  EXPECT_EQ(Signature::of(operation(Op::all_reduce, 12, DType::float32, 1000)).describe(),
            "all_reduce #12 float32[1000] sum");
  EXPECT_EQ(Signature::of(operation(Op::barrier, 4, DType::uint8, 0)).describe(), "barrier #4");
  EXPECT_EQ(Signature::of(operation(Op::all_gather, 5, DType::bool8, 7)).describe(), "all_gather #5 bool8[7]");

  Operation broadcast = operation(Op::broadcast, 3, DType::int64, 5);
  broadcast.root = 2;
  EXPECT_EQ(Signature::of(broadcast).describe(), "broadcast #3 int64[5] root 2");

  Operation reduce = operation(Op::reduce, 9, DType::bfloat16, 1);
  reduce.root = 1;
  reduce.reduce = ReduceOp::max;
  EXPECT_EQ(Signature::of(reduce).describe(), "reduce #9 bfloat16[1] max root 1");

  Operation scaled = operation(Op::reduce_scatter, 1, DType::float16, 8);
  scaled.reduce = ReduceOp::premultiplied(0.5);
  EXPECT_EQ(Signature::of(scaled).describe(), "reduce_scatter #1 float16[8] premul_sum by 0.5");
}

TEST(Signature, UnevenCountsAreDistinguished) {
  const auto describe = [](std::vector<std::size_t> counts) {
    Operation gather = operation(Op::all_gather, 7, DType::float32, 0);
    gather.parts = Parts(counts);
    return Signature::of(gather).describe();
  };
  EXPECT_EQ(describe({1, 2}).rfind("all_gather #7 float32[uneven ", 0), 0u) << describe({1, 2});
  EXPECT_NE(describe({1, 2}), describe({2, 1}));
}

TEST(Signature, UnevenCountsOfAPremultipliedSumAreDistinguished) {
  const auto scaled = [](Op op, std::size_t count, std::vector<std::size_t> counts) {
    Operation result = operation(op, 7, DType::float32, count);
    result.reduce = ReduceOp::premultiplied(2);
    result.parts = Parts(counts);
    return Signature::of(result);
  };
  EXPECT_NE(scaled(Op::reduce_scatter, 0, {1, 2}), scaled(Op::reduce_scatter, 0, {2, 1}));
  EXPECT_NE(scaled(Op::reduce_scatter, 0, {1, 2}).describe(), scaled(Op::reduce_scatter, 0, {2, 1}).describe());
  EXPECT_EQ(scaled(Op::reduce_scatter, 0, {1, 2}).describe().rfind("reduce_scatter #7 float32[uneven ", 0), 0u);
  // Buffers that travel together: the same number of elements, cut differently.
  EXPECT_NE(scaled(Op::all_reduce, 3, {1, 2}).describe(), scaled(Op::all_reduce, 3, {2, 1}).describe());
  EXPECT_EQ(scaled(Op::all_reduce, 3, {1, 2}).describe().rfind("all_reduce #7 float32[3 in parts ", 0), 0u);
}

TEST(Signature, ListsOfAllToAllNeedNotBeTheSameButMustBeThere) {
  const auto with_counts = [](std::vector<std::size_t> counts) {
    Operation result = operation(Op::all_to_all, 7, DType::float32, 0);
    result.in_parts = Parts(counts);
    result.out_parts = Parts(counts);
    return Signature::of(result);
  };
  EXPECT_EQ(with_counts({1, 2}), with_counts({2, 1}));
  EXPECT_EQ(with_counts({1, 2}).describe(), "all_to_all #7 float32[uneven]");
  EXPECT_NE(with_counts({0, 0}), Signature::of(operation(Op::all_to_all, 7, DType::float32, 0)));
}

TEST(Signature, ListsOfNewGroupsAreDistinguished) {
  const auto describe = [](std::vector<std::size_t> list) {
    Operation agree = operation(Op::barrier, 7, DType::uint8, 0);
    agree.parts = Parts(list);
    return Signature::of(agree).describe();
  };
  EXPECT_EQ(describe({0, 1}).rfind("new_group #7 of list ", 0), 0u) << describe({0, 1});
  EXPECT_NE(describe({0, 1}), describe({1, 0}));
}

TEST(Signature, DiffersInEveryPart) {
  const Operation base = operation(Op::all_reduce, 12, DType::float32, 1000);
  std::vector<Operation> others(7, base);
  others[0].op = Op::reduce;
  others[1].seq = 13;
  others[2].dtype = DType::int32;
  others[3].count = 1001;
  others[4].root = 1;
  others[5].reduce = ReduceOp::avg;
  others[6].reduce = ReduceOp::premultiplied(2);
  EXPECT_EQ(Signature::of(base), Signature::of(base));
  for (const Operation& other : others) EXPECT_NE(Signature::of(base), Signature::of(other));
  Operation doubled = base;
  doubled.reduce = ReduceOp::premultiplied(3);
  EXPECT_NE(Signature::of(doubled), Signature::of(others[6]));
}

TEST(Signature, NonsenseFromTheWireIsShownAsNumbers) {
  Signature nonsense;
  nonsense.seq = 1;
  nonsense.what = 77u | 99u << 8 | 200u << 16;
  nonsense.count = 5;
  EXPECT_EQ(nonsense.describe(), "op 77 #1 dtype 99[5] reduce op 200 root 0");
  constexpr auto kMax = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ((Signature{kMax, kMax, kMax, kMax}.describe()),
            "op 255 #18446744073709551615 dtype 255[18446744073709551615] reduce op 255 root -1");
  for (std::uint64_t what = 0; what < 0x1000000; what += 251) {
    EXPECT_FALSE((Signature{0, what, 0, kMax}.describe().empty()));
  }
}

}  // namespace
}  // namespace maniple
