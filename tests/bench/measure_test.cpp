#include "bench/measure.h"

#include <gtest/gtest.h>

#include "bench/row.h"
#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

/// One rank that talks to nobody: with one rank, doing nothing is a correct all_reduce.
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
  EXPECT_NEAR(rows[1].algbw_gbps, 1024 / rows[1].median_us / 1e3, 1e-9);
}

TEST(Measure, MakesTheCallsItWasTold) {
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

}  // namespace
}  // namespace maniple::bench
