#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "comm/backend/work_state.h"
#include <maniple/comm/error.h>
#include <maniple/comm/work.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;

std::exception_ptr failure() { return std::make_exception_ptr(Timeout("too late")); }

struct Running {
  std::shared_ptr<detail::WorkState> state = std::make_shared<detail::WorkState>();
  Work work{state};
};

TEST(Work, AnEmptyHandleCanOnlyBeQueried) {
  const Work nothing;
  EXPECT_FALSE(nothing.valid());
  EXPECT_THROW(nothing.done(), InvalidArgument);
  EXPECT_THROW(nothing.wait(), InvalidArgument);
  EXPECT_THROW(nothing.then([] {}), InvalidArgument);
}

TEST(Work, WaitReturnsWhenItIsDone) {
  Running running;
  EXPECT_TRUE(running.work.valid());
  EXPECT_FALSE(running.work.done());
  EXPECT_EQ(running.work.error(), nullptr);
  std::thread other([&] { running.state->finish(nullptr); });
  running.work.wait();
  EXPECT_TRUE(running.work.done());
  EXPECT_EQ(running.work.error(), nullptr);
  other.join();
  running.work.wait();  // waiting again is allowed
}

TEST(Work, WaitThrowsTheErrorEveryTime) {
  Running running;
  const Work copy = running.work;
  running.state->finish(failure());
  EXPECT_THROW(running.work.wait(), Timeout);
  EXPECT_THROW(copy.wait(), Timeout);
  EXPECT_THROW(copy.wait_until(Deadline::after(milliseconds(0))), Timeout);
  EXPECT_NE(copy.error(), nullptr);
}

TEST(Work, WaitUntilReturnsFalseAtTheDeadline) {
  Running running;
  EXPECT_FALSE(running.work.wait_until(Deadline::after(milliseconds(0))));
  EXPECT_FALSE(running.work.wait_until(Deadline::after(milliseconds(10))));
  EXPECT_FALSE(running.work.done());
  running.state->finish(nullptr);
  EXPECT_TRUE(running.work.wait_until(Deadline::after(milliseconds(0))));
  EXPECT_TRUE(running.work.wait_until(Deadline::never()));
}

TEST(Work, ContinuationsRunInTheFinishingThread) {
  Running running;
  std::thread::id ran_in;
  const Work after = running.work.then([&] { ran_in = std::this_thread::get_id(); });
  EXPECT_FALSE(after.done());
  std::thread other([&] { running.state->finish(nullptr); });
  const std::thread::id other_id = other.get_id();
  after.wait();
  other.join();
  EXPECT_EQ(ran_in, other_id);
}

TEST(Work, ContinuationsOfFinishedWorkRunImmediatelyInTheCaller) {
  Running running;
  running.state->finish(nullptr);
  std::thread::id ran_in;
  const Work after = running.work.then([&] { ran_in = std::this_thread::get_id(); });
  EXPECT_TRUE(after.done());
  EXPECT_EQ(ran_in, std::this_thread::get_id());
}

TEST(Work, ContinuationsRunInTheOrderTheyWereAdded) {
  Running running;
  std::string order;
  running.work.then([&] { order += 'a'; });
  running.work.then([&] { order += 'b'; }).then([&] { order += 'c'; });
  running.work.then([&] { order += 'd'; });
  running.state->finish(nullptr);
  EXPECT_EQ(order, "abcd");
}

TEST(Work, ErrorsSkipContinuations) {
  Running running;
  bool ran = false;
  const Work after = running.work.then([&] { ran = true; });
  const Work later = after.then([&] { ran = true; });
  running.state->finish(failure());
  EXPECT_THROW(after.wait(), Timeout);
  EXPECT_THROW(later.wait(), Timeout);
  EXPECT_FALSE(ran);
}

TEST(Work, ContinuationsMayThrow) {
  Running running;
  const Work after = running.work.then([] { throw std::logic_error("oh"); });
  running.state->finish(nullptr);
  EXPECT_NO_THROW(running.work.wait());
  EXPECT_THROW(after.wait(), std::logic_error);
}

}  // namespace
}  // namespace maniple
