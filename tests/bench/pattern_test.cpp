#include "bench/pattern.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace maniple::bench {
namespace {

constexpr int kRanks = 3;

/// What a correct all_reduce, all_gather, ... would leave in rank `rank`'s output, for float32.
std::vector<float> reference(const Case& what, int rank) {
  std::vector<std::vector<float>> in(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    in[r].resize(what.in_count(r));
    fill_input(what, r, in[r].data());
  }
  std::vector<float> out(what.out_count(rank));
  const std::size_t part = what.part();
  for (std::size_t j = 0; j < out.size(); ++j) {
    const std::size_t mine = rank * part + j;
    switch (what.op) {
      case Op::all_reduce:
      case Op::reduce: out[j] = in[0][j] + in[1][j] + in[2][j]; break;
      case Op::reduce_scatter: out[j] = in[0][mine] + in[1][mine] + in[2][mine]; break;
      case Op::gather:
      case Op::all_gather: out[j] = in[j / part][j % part]; break;
      case Op::scatter: out[j] = in[0][mine]; break;
      case Op::all_to_all: out[j] = in[j / part][rank * part + j % part]; break;
      default: out[j] = in[0][j]; break;
    }
  }
  return out;
}

TEST(Pattern, AcceptsRightResultsAndNoOthers) {
  for (const Op op : measured_operations()) {
    if (op == Op::barrier) continue;
    const Case what = Case::of(op, DType::float32, ReduceOp::sum, kRanks, 4000);
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<float> out = reference(what, rank);
      EXPECT_EQ(count_wrong(what, rank, out.data()), 0u) << to_string(op) << " rank " << rank;
      if (out.empty()) continue;
      out[out.size() / 2] += 1;
      EXPECT_EQ(count_wrong(what, rank, out.data()), 1u) << to_string(op) << " rank " << rank;
    }
  }
}

TEST(Pattern, ShiftedDataIsNoticed) {
  const Case what = Case::of(Op::broadcast, DType::float32, ReduceOp::sum, kRanks, 4096);
  for (const std::size_t shift : {1u, 4u, 16u, 64u, 256u}) {
    std::vector<float> out = reference(what, 1);
    std::memmove(out.data(), out.data() + shift, (out.size() - shift) * sizeof(float));
    EXPECT_GT(count_wrong(what, 1, out.data()), 100u) << shift;
  }
}

TEST(Pattern, LargeBuffersAreCheckedAtBothEndsAndBetween) {
  const Case what = Case::of(Op::broadcast, DType::float32, ReduceOp::sum, kRanks, 16 << 20);
  const std::vector<float> right = reference(what, 1);
  EXPECT_EQ(count_wrong(what, 1, right.data()), 0u);
  for (const std::size_t at : {std::size_t{0}, right.size() - 1}) {
    std::vector<float> out = right;
    out[at] += 1;
    EXPECT_EQ(count_wrong(what, 1, out.data()), 1u) << at;
  }
  std::vector<float> stale = right;  // one 64 KiB chunk in the middle never arrived
  std::fill_n(stale.begin() + 1'000'000, 16'384, -1.f);
  EXPECT_GT(count_wrong(what, 1, stale.data()), 10u);
}

TEST(Pattern, EveryDtypeAndReduceOpHasAnExpectation) {
  const auto check = [](DType dtype, ReduceOp op) {
    const Case what = Case::of(Op::all_reduce, dtype, op, 1, 64);
    std::vector<std::byte> data(64);
    fill_input(what, 0, data.data());
    // Of one rank, and with a factor of one, the reduction is the input itself.
    EXPECT_EQ(count_wrong(what, 0, data.data()), 0u) << to_string(dtype) << " " << to_string(op.kind());
  };
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (int kind = 0; kind < ReduceOp::kKindCount; ++kind) {
      check(static_cast<DType>(dtype), ReduceOp(static_cast<ReduceOp::Kind>(kind)));
    }
  }
}

}  // namespace
}  // namespace maniple::bench
