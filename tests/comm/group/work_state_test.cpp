#include <future>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "comm/group/work_state.h"
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

TEST(TaskQueue, RunsTasksInOrderInOneThreadOfItsOwn) {
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  {
    TaskQueue queue;
    for (int i = 0; i < 1000; ++i) {
      queue.push([&, i] {
        order.push_back(i);
        threads.push_back(std::this_thread::get_id());
      });
    }
  }  // runs what is queued
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
  for (const std::thread::id id : threads) {
    EXPECT_EQ(id, threads.front());
    EXPECT_NE(id, std::this_thread::get_id());
  }
}

TEST(TaskQueue, WaitsForMoreWhenItIsEmpty) {
  TaskQueue queue;
  for (int round = 0; round < 3; ++round) {
    std::promise<int> done;
    queue.push([&] { done.set_value(round); });
    EXPECT_EQ(done.get_future().get(), round);
  }
}

TEST(TaskQueue, ATaskMayQueueAnother) {
  std::promise<void> done;
  TaskQueue queue;
  queue.push([&] { queue.push([&] { done.set_value(); }); });
  done.get_future().get();
}

TEST(TaskQueue, ATaskIsDroppedBeforeTheNextRuns) {
  std::promise<bool> dropped;
  TaskQueue queue;
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = held;
  queue.push([held = std::move(held)] {});
  queue.push([&] { dropped.set_value(watch.expired()); });
  EXPECT_TRUE(dropped.get_future().get());
}

}  // namespace

}  // namespace maniple
