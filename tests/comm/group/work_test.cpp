// Work: done, wait, wait_until, error, then; the order of operations of one group.
#include <atomic>
#include <stdexcept>
#include <thread>

#include <maniple/comm/error.h>

#include "comm/group/matrix.h"

namespace maniple::harness {
namespace {

class WorkTest : public Operations {};
INSTANTIATE_TEST_SUITE_P(Few, WorkTest, testing::ValuesIn(places({2, 4, 5})), name_of);

TEST_P(WorkTest, IsDoneWhenTheLastRankHasCome) {
  run([](Rank& r) {
    int value = 1;
    if (r.rank == 0) {
      const Work work = r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true});
      EXPECT_TRUE(work.valid());
      EXPECT_FALSE(work.done());
      EXPECT_EQ(work.error(), nullptr);
      EXPECT_FALSE(work.wait_until(Deadline::after(Seconds(0.05)))) << "the other ranks have not arrived";
      r.phase("rank 0 has waited");
      EXPECT_TRUE(work.wait_until(Deadline::after(Seconds(60))));
      EXPECT_TRUE(work.done());
      EXPECT_EQ(work.error(), nullptr);
      work.wait();  // again: at once
    } else {
      r.phase("rank 0 has waited");
      r.world->all_reduce(buffer_of(value));
    }
    EXPECT_EQ(value, r.size);
  });
}

TEST(Work, DefaultIsAHandleToNothing) { EXPECT_FALSE(Work().valid()); }

TEST_P(WorkTest, ThenRunsAfterTheOperationAndForwardsExceptions) {
  run([](Rank& r) {
    int value = 1;
    int seen = 0;
    const Work first = r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true});
    const Work second = first.then([&] { seen = value; });
    const Work third = second.then([&] { throw std::runtime_error("from then"); });
    bool ran = false;
    const Work fourth = third.then([&] { ran = true; });
    second.wait();
    EXPECT_EQ(seen, r.size);
    EXPECT_THROW(third.wait(), std::runtime_error);
    EXPECT_THROW(fourth.wait(), std::runtime_error);
    EXPECT_NE(third.error(), nullptr);
    EXPECT_FALSE(ran);
    first.wait();

    bool at_once = false;
    first.then([&] { at_once = true; });  // done already: runs here
    EXPECT_TRUE(at_once);
    r.world->barrier();  // what `then` throws does not fail the group
  });
}

TEST_P(WorkTest, ManyInFlightFinishInOrder) {
  run([](Rank& r) {
    constexpr int kOperations = 300;
    std::vector<std::vector<std::int32_t>> values(kOperations);
    std::vector<Work> works;
    std::vector<int> finished;  // written by `then` in the order of the operations, read after the last
    for (int i = 0; i < kOperations; ++i) {
      values[i].assign(1 + i * 7 % 500, i + r.rank);
      works.push_back(r.world->all_reduce(buffer_of(values[i]), ReduceOp::sum, {.async_op = true}).then([&finished, i] {
        finished.push_back(i);
      }));
    }
    for (const Work& work : works) work.wait();
    const int ranks_sum = r.size * (r.size - 1) / 2;
    for (int i = 0; i < kOperations; ++i) {
      for (const std::int32_t value : values[i]) ASSERT_EQ(value, i * r.size + ranks_sum) << "operation " << i;
    }
    EXPECT_EQ(finished.size(), static_cast<std::size_t>(kOperations));
    for (std::size_t i = 0; i < finished.size(); ++i) ASSERT_EQ(finished[i], static_cast<int>(i));
  });
}

TEST_P(WorkTest, SynchronousCallAfterAsynchronousOnesKeepsTheOrder) {
  run([](Rank& r) {
    for (int round = 0; round < 20; ++round) {
      // value -> sum -> broadcast of rank 0's -> max: each step needs the one before.
      std::int64_t value = r.rank + round;
      const Work sum = r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true});
      const Work copied = r.world->broadcast(buffer_of(value), 0, {.async_op = true});
      r.world->all_reduce(buffer_of(value), ReduceOp::sum);
      EXPECT_TRUE(sum.done());
      EXPECT_TRUE(copied.done());
      EXPECT_EQ(value, r.size * (r.size * round + r.size * (r.size - 1) / 2));
    }
  });
}

TEST_P(WorkTest, DroppedHandlesNeitherWaitNorCancel) {
  run([](Rank& r) {
    std::vector<double> value(1000, 1.0);
    r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true});
    r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true});
    r.world->barrier();
    for (const double element : value) ASSERT_EQ(element, static_cast<double>(r.size) * r.size);
  });
}

TEST_P(WorkTest, MayBeWaitedForInOtherThreads) {
  run([](Rank& r) {
    std::vector<float> value(10'000, 1.0f);
    const Work work = r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true});
    std::atomic<int> returned{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([copy = work, &returned] {
        copy.wait();
        ++returned;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(returned, 4);
    EXPECT_EQ(value.back(), static_cast<float>(r.size));
  });
}

TEST_P(WorkTest, AsynchronousMistakesAreThrownAtOnceOrByWait) {
  run([](Rank& r) {
    float value = 1;
    EXPECT_THROW(r.world->all_reduce(buffer_of(value), ReduceOp::band, {.async_op = true}).wait(), InvalidArgument);
    EXPECT_THROW(r.world->broadcast(buffer_of(value), r.size, {.async_op = true}).wait(), InvalidArgument);
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, static_cast<float>(r.size));
  });
}

TEST_P(WorkTest, RecentOperationsAreRecorded) {
  run([](Rank& r) {
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    r.world->broadcast(buffer_of(value), 0);
    const auto recent = r.world->recent_operations();
    ASSERT_GE(recent.size(), 2u);
    EXPECT_NE(recent[recent.size() - 2].find("all_reduce"), std::string::npos) << recent[recent.size() - 2];
    EXPECT_NE(recent.back().find("broadcast"), std::string::npos) << recent.back();
  });
}

TEST_P(WorkTest, TheLastHandleMayBeDroppedInAContinuation) {
  run([](Rank& r) {
    auto group = r.world->split(0);
    const Work work = group->barrier({.async_op = true});
    const Work gone = work.then([group = std::move(group)]() mutable { group.reset(); });
    gone.wait();
    r.world->barrier();
  });
}

}  // namespace
}  // namespace maniple::harness
