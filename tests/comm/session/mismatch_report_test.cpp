#include "comm/session/mismatch_report.h"

#include <future>
#include <vector>

#include <gtest/gtest.h>

namespace maniple {
namespace {

TEST(ComparedCalls, TravelAsText) {
  for (const ComparedCalls& compared : {ComparedCalls{}, ComparedCalls{.members = {3, 0, 1023}, .arguments = false}}) {
    const ComparedCalls read = decode_compared_calls(encode(compared));
    EXPECT_EQ(read.members, compared.members);
    EXPECT_EQ(read.arguments, compared.arguments);
  }
}

TEST(ComparedCalls, MalformedTextIsRefused) {
  const std::string text = encode({.members = {1, 2}, .arguments = true});
  for (std::size_t length = 0; length < text.size(); ++length)
    EXPECT_THROW(decode_compared_calls(text.substr(0, length)), ProtocolError) << length;
  EXPECT_THROW(decode_compared_calls(text + '\0'), ProtocolError);
  EXPECT_THROW(decode_compared_calls(std::string("\1\xff\xff\xff\xff", 5)), ProtocolError);
}

// Rank 0 of a world of four leads; the test replies for the others.
class Compare : public testing::Test {
 protected:
  Compare() {
    MismatchReports::Callbacks callbacks;
    callbacks.loop = loop_;
    callbacks.rank = 0;
    callbacks.called = [this](const std::string&, std::uint64_t) { return RankCall{.rank = 0, .call = calls_[0]}; };
    callbacks.send = [this](int rank, const DetectorMessage& query) {
      asked_.push_back(rank);
      DetectorMessage answer = query;
      answer.rank = rank;
      answer.text = calls_[static_cast<std::size_t>(rank)];
      answer.kind = answer.text.empty() ? DetectorMessage::Kind::call_pending : DetectorMessage::Kind::call_reply;
      loop_->post([reports = reports_, answer] { reports->answered(answer); });
    };
    callbacks.finished = [this](const DetectorMessage& abort) { finished_.set_value(abort); };
    reports_ = std::make_shared<MismatchReports>(callbacks);
  }
  ~Compare() override {
    loop_->post_and_wait([this] { reports_->stop(); });
  }

  void compare(const ComparedCalls& compared) {
    DetectorMessage question;
    question.kind = DetectorMessage::Kind::compare;
    question.rank = 1;
    question.group = "world";
    question.seq = 7;
    question.text = encode(compared);
    loop_->post_and_wait([&] { reports_->compare(question, {1, 2, 3}); });
    loop_->post_and_wait([] {});  // the replies have been handled
  }
  bool is_finished() { return result_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

  std::shared_ptr<EventLoop> loop_ = EventLoop::shared();
  std::vector<std::string> calls_{"barrier #7", "barrier #7", "barrier #7", "barrier #7"};
  std::vector<int> asked_;
  std::promise<DetectorMessage> finished_;
  std::future<DetectorMessage> result_ = finished_.get_future();
  std::shared_ptr<MismatchReports> reports_;
};

TEST_F(Compare, EqualCallsAndLateRanksAreNoErrors) {
  calls_[2].clear();
  compare({});
  EXPECT_EQ(asked_, (std::vector<int>{1, 2, 3}));
  EXPECT_FALSE(is_finished());
}

TEST_F(Compare, ADifferenceIsFoundAlthoughOneRankIsLate) {
  calls_[1] = "all_reduce #7 float32[2] sum";
  calls_[2].clear();
  compare({});
  ASSERT_TRUE(is_finished());
  const ErrorInfo error = result_.get().error;
  EXPECT_EQ(error.kind, ErrorKind::mismatch);
  EXPECT_EQ(error.origin, 1);
  EXPECT_EQ(error.calls.size(), 3u);
}

TEST_F(Compare, OnlyMembersAreAsked) {
  calls_[0] = "all_reduce #7 float32[2] sum";  // of a group that the leader is not in
  compare({.members = {1, 3}});
  EXPECT_EQ(asked_, (std::vector<int>{1, 3}));
  EXPECT_FALSE(is_finished());
}

TEST_F(Compare, ArgumentsMayBeLeftOut) {
  calls_[1] = "all_gather #7 float32[2]";
  calls_[0] = calls_[2] = calls_[3] = "all_gather #7 float32[3]";
  compare({.members = {}, .arguments = false});
  EXPECT_FALSE(is_finished());
}

// Many ranks send the question at about the same time, and some later.
TEST_F(Compare, ARepeatedQuestionIsAnsweredOnceMoreLater) {
  compare({});
  calls_[3] = "broadcast #7 float32[2] root 0";
  compare({});
  compare({});
  EXPECT_EQ(asked_.size(), 3u);
  result_.wait();
  loop_->post_and_wait([&] { EXPECT_EQ(asked_.size(), 6u); });
}

}  // namespace
}  // namespace maniple
