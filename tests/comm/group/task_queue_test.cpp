#include <future>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "comm/group/group_impl.h"

namespace maniple {
namespace {

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
