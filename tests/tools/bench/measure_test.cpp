#include "tools/bench/measure.h"

#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "tools/bench/work_item.h"
#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

/// A single rank without communication: with one rank, doing nothing is a correct all_reduce.
class LoneCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  std::string transport() const override { return "none"; }
  std::byte* memory(std::size_t bytes) override { return memory_.at_least(bytes); }
  void prepare(const Case&, std::byte*, std::byte* out) override { out_ = out; }
  void call() override { ++calls; }
  std::uint64_t largest(std::uint64_t value) override { return value; }
  int calls = 0;

 protected:
  std::byte* out_ = nullptr;
  PageMemory memory_;
};

struct SpoilingCommunicator : LoneCommunicator {
  void call() override { out_[1] ^= std::byte{0xff}; }
};

struct RefusingCommunicator : LoneCommunicator {
  void prepare(const Case& what, std::byte*, std::byte*) override {
    if (what.bytes() == 4) throw Unsupported("not for so little");
  }
};

// A call leaves its input dirty, and counts the calls that found it so.
struct SoilingCommunicator : LoneCommunicator {
  void prepare(const Case& what, std::byte* in, std::byte* out) override {
    LoneCommunicator::prepare(what, in, out);
    last_ = in + what.bytes() - 1;
  }
  void call() override {
    LoneCommunicator::call();
    if (calls == 1) return;  // its result is looked at
    dirty += *last_ != std::byte{0} ? 1 : 0;
    *last_ = std::byte{1};
  }
  int dirty = 0;

 private:
  std::byte* last_ = nullptr;
};

WorkItem item_of(std::vector<std::uint64_t> bytes) {
  WorkItem item;
  item.ranks = 1;
  item.bytes = std::move(bytes);
  item.budget_s = 0.001;
  return item;
}

std::vector<Row> rows_of(Communicator& communicator, const WorkItem& item) {
  std::vector<Row> rows;
  measure(communicator, item, [&](const Row& row) { rows.push_back(row); });
  return rows;
}

TEST(Measure, WritesInputsAnewBeforeEachTimedCallIfAsked) {
  for (const bool rewrite : {false, true}) {
    SoilingCommunicator communicator;
    WorkItem item = item_of({1024});
    item.rewrite = rewrite;
    item.iterations = 10;
    item.warmup = 0;
    const auto rows = rows_of(communicator, item);
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0].rewritten, rewrite);
    const int untimed = communicator.calls - 10;
    // Before the first of them the input was cleared.
    EXPECT_EQ(communicator.dirty, rewrite ? untimed - 2 : communicator.calls - 2);
  }
}

TEST(Measure, GivesOneRowForEachSize) {
  LoneCommunicator communicator;
  const auto rows = rows_of(communicator, item_of({4, 1024}));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1].bytes, 1024u);
  EXPECT_EQ(rows[1].op, "all_reduce");
  EXPECT_EQ(rows[1].transport, "none");
  EXPECT_GE(rows[1].iterations, 5u);
  EXPECT_GT(rows[1].median_us, 0);
  EXPECT_GE(rows[1].p99_us, rows[1].median_us);
  EXPECT_GT(rows[1].mean_us, 0);
  EXPECT_NEAR(rows[1].algbw_gbps, 1024 / rows[1].median_us / 1e3, 1e-9);
}

TEST(Measure, MakesTheRequestedNumberOfCalls) {
  LoneCommunicator communicator;
  WorkItem item = item_of({4});
  item.iterations = 70;
  item.warmup = 10;
  EXPECT_EQ(rows_of(communicator, item).front().iterations, 70u);
  EXPECT_EQ(communicator.calls, 1 + 3 + 10 + 70) << "checked call, probes, warm-up, timed";
}

TEST(Measure, WrongResultsAreNotTimed) {
  SpoilingCommunicator communicator;
  const auto rows = rows_of(communicator, item_of({4, 64}));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_NE(rows[0].error.find("wrong result"), std::string::npos);
  EXPECT_EQ(rows[0].median_us, 0);
}

TEST(Measure, ARefusedCaseDoesNotEndTheOthers) {
  RefusingCommunicator communicator;
  const auto rows = rows_of(communicator, item_of({4, 64}));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].error, "not for so little");
  EXPECT_TRUE(rows[1].error.empty());
}

TEST(Statistics, NearestRank) {
  std::vector<double> hundred(100);
  for (int i = 0; i < 100; ++i) hundred[static_cast<std::size_t>(i)] = 100 - i;
  EXPECT_EQ(median(hundred), 50);
  EXPECT_EQ(percentile(hundred, 0.99), 99);
  EXPECT_EQ(percentile({7}, 0.99), 7);
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({}), 0);
}

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
