#include "comm/session/mismatch_report.h"

#include <vector>

#include <gtest/gtest.h>

namespace maniple::detector {
namespace {

// Rank 0 of a world of four leads; the test replies for all.
class CompareTest : public testing::Test {
 protected:
  void compare(bool arguments = true, std::vector<std::int32_t> members = {}) {
    Effects effects;
    reports_.compare({.rank = 1, .seq = 7, .group = "world", .arguments = arguments, .members = std::move(members)},
                     {1, 2, 3}, now_, effects);
    reply(effects);
  }
  /// Lets the time pass until the next timer.
  void wait() {
    ASSERT_TRUE(reports_.due());
    now_ = *reports_.due();
    Effects effects;
    reports_.wake({1, 2, 3}, now_, effects);
    reply(effects);
  }
  void reply(const Effects& effects) {
    for (const Effect& effect : effects) {
      const auto* send = std::get_if<Send>(&effect);
      const int rank = send == nullptr ? 0 : send->to;
      if (send != nullptr) asked_.push_back(rank);
      const auto& query = send == nullptr ? std::get<LookUpCall>(effect).query : std::get<QueryCall>(send->message);
      reports_.answered(query, {.rank = rank, .call = calls_[static_cast<std::size_t>(rank)]});
    }
    for (Abort& abort : reports_.take_finished()) finished_.push_back(std::move(abort));
  }

  Time now_{std::chrono::seconds(100)};
  std::vector<std::string> calls_{"barrier #7", "barrier #7", "barrier #7", "barrier #7"};
  std::vector<int> asked_;
  std::vector<Abort> finished_;
  MismatchReports reports_{0};
};

TEST_F(CompareTest, EqualCallsAndLateRanksAreNoErrors) {
  calls_[2].clear();
  compare();
  EXPECT_EQ(asked_, (std::vector<int>{1, 2, 3}));
  EXPECT_TRUE(finished_.empty());
  EXPECT_FALSE(reports_.due()) << "it does not wait for the late rank";
}

TEST_F(CompareTest, ADifferenceIsFoundAlthoughOneRankIsLate) {
  calls_[1] = "all_reduce #7 float32[2] sum";
  calls_[2].clear();
  compare();
  ASSERT_EQ(finished_.size(), 1u);
  const ErrorInfo& error = finished_.front().error;
  EXPECT_EQ(error.kind, ErrorKind::mismatch);
  EXPECT_EQ(error.origin, 1);
  EXPECT_EQ(error.calls.size(), 3u);
}

TEST_F(CompareTest, OnlyMembersAreAsked) {
  calls_[0] = "all_reduce #7 float32[2] sum";  // of a group that the leader is not in
  compare(true, {1, 3});
  EXPECT_EQ(asked_, (std::vector<int>{1, 3}));
  EXPECT_TRUE(finished_.empty());
}

TEST_F(CompareTest, ArgumentsMayBeLeftOut) {
  calls_[1] = "all_gather #7 float32[2]";
  calls_[0] = calls_[2] = calls_[3] = "all_gather #7 float32[3]";
  compare(false);
  EXPECT_TRUE(finished_.empty());
}

// Many ranks send the question at about the same time, and some later.
TEST_F(CompareTest, ARepeatedQuestionIsAnsweredOnceMoreLater) {
  compare();
  calls_[3] = "broadcast #7 float32[2] root 0";
  compare();
  compare();
  EXPECT_EQ(asked_.size(), 3u);
  wait();
  EXPECT_EQ(asked_.size(), 6u);
  EXPECT_EQ(finished_.size(), 1u);
}

TEST_F(CompareTest, ARankThatIsGoneIsNotAwaited) {
  Effects effects;
  reports_.begin({.rank = 1, .seq = 7, .group = "world", .error = {.kind = ErrorKind::mismatch}}, {1, 2, 3}, now_,
                 effects);
  effects.resize(3);
  reply(effects);  // of ranks 0 to 2
  EXPECT_TRUE(finished_.empty());
  reports_.forget(3);
  EXPECT_EQ(reports_.take_finished().size(), 1u);
}

}  // namespace
}  // namespace maniple::detector
