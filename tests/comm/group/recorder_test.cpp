#include "comm/group/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace maniple {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

Operation operation(std::uint64_t seq, SourceLocation where = SourceLocation::current()) {
  Operation op;
  op.op = Op::all_reduce;
  op.dtype = DType::float32;
  op.count = 1000;
  op.seq = seq;
  op.where = where;
  return op;
}

TEST(Recorder, KnowsWhatWasCalledAndWhere) {
  Recorder recorder(8);
  const int line = __LINE__ + 1;
  recorder.begin(operation(12));
  EXPECT_EQ(recorder.called(12).call, "all_reduce #12 float32[1000] sum");
  EXPECT_THAT(recorder.called(12).place, EndsWith("recorder_test.cpp:" + std::to_string(line)));
  EXPECT_THAT(recorder.last().call, AllOf(StartsWith("all_reduce #12 float32[1000] sum at "),
                                          EndsWith("recorder_test.cpp:" + std::to_string(line))));
  EXPECT_EQ(recorder.called(11), RankCall());
  EXPECT_EQ(recorder.called(20), RankCall());  // would have the same entry
  EXPECT_EQ(recorder.called(0), RankCall());
}

TEST(Recorder, LinesSayHowLongItTookAndHowItEnded) {
  Recorder recorder(8);
  EXPECT_THAT(recorder.lines(), IsEmpty());
  recorder.begin(operation(1));
  recorder.end(1, false);
  recorder.begin(operation(2));
  recorder.end(2, true);
  recorder.begin(operation(3));
  const std::vector<std::string> lines = recorder.lines();
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines[0],
              AllOf(StartsWith("all_reduce #1 "), HasSubstr(", began 0.0"), HasSubstr("took "), EndsWith(" us")));
  EXPECT_THAT(lines[1], AllOf(StartsWith("all_reduce #2 "), HasSubstr("failed after "), EndsWith(" us")));
  EXPECT_THAT(lines[2], AllOf(StartsWith("all_reduce #3 "), EndsWith("still running")));
}

TEST(Recorder, KeepsTheLastOnesOldestFirst) {
  Recorder recorder(4);
  for (std::uint64_t seq = 1; seq <= 10; ++seq) {
    recorder.begin(operation(seq));
    recorder.end(seq, false);
  }
  const std::vector<std::string> lines = recorder.lines();
  ASSERT_EQ(lines.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_THAT(lines[i], StartsWith("all_reduce #" + std::to_string(7 + i) + " "));
  EXPECT_EQ(recorder.called(6), RankCall());
  EXPECT_NE(recorder.called(7), RankCall());
}

TEST(Recorder, InternalCallsHaveNoSourceLocation) {
  Recorder recorder(8);
  Operation barrier;
  barrier.seq = 1;
  recorder.begin(barrier);
  EXPECT_EQ(recorder.called(1), RankCall({.call = "barrier #1"}));
}

TEST(Recorder, CanBeOff) {
  Recorder recorder(0);
  recorder.begin(operation(1));
  recorder.end(1, false);
  EXPECT_THAT(recorder.lines(), IsEmpty());
  EXPECT_EQ(recorder.called(1), RankCall());
}

}  // namespace
}  // namespace maniple
