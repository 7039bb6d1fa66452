// Operations of a group on device memory, in the order of streams. With a GPU, or with
// host_device_plugin.cpp in its place.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "comm/backend/plugin/load.h"
#include "comm/backend/work_state.h"
#include "comm/capi/handles.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "plugins/device_place.h"

namespace maniple::device_calls_test {
namespace {

using harness::catch_error;
using harness::Caught;
using harness::Rank;

class DeviceCalls : public EachBackend {};
INSTANTIATE_TEST_SUITE_P(Backend, DeviceCalls, testing::Values("cuda", "native"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(DeviceCalls, RunInTheOrderOfTheStream) {
  run_ranks(ranks(3), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    for (const std::size_t count : {kFew, kMany}) {
      for (const bool async_op : {false, true}) {
        const Buffer source = place.ints(count, r.rank + 1);
        const Buffer data = place.ints(count, 0);
        const Buffer result = place.ints(count, 0);
        if (r.rank == 1) place.hold(stream);  // the data of one rank comes late
        place.copy(data, source, stream);
        const Work work = r.world->all_reduce(data, ReduceOp::sum, {.async_op = async_op, .stream = stream});
        if (r.rank == 1) {
          EXPECT_FALSE(work.done());
          place.open();
        }
        if (async_op) work.synchronize();
        place.copy(result, data, stream);
        place.finish(stream);
        place.expect_all(result, 6);
      }
    }
  });
}

// The default stream of every device has the same handle, and another device is the calling thread's current one.
TEST(DevicesDeviceCalls, EveryRankUsesTheDefaultStreamOfItsOwnDevice) {
  const harness::RunOptions options{
      .n = 2, .as = harness::As::processes, .backend = "cuda", .env = {{"HOST_DEVICE_COUNT", "2"}}};
  run_ranks(options, [](Rank& r) {
    Place place(r.rank);
    for (const std::size_t count : {kFew, kMany}) {  // by the engine, and through host memory
      for (const bool async_op : {false, true}) {
        const Buffer source = place.ints(count, r.rank + 1);
        const Buffer data = place.ints(count, 0);
        const Buffer result = place.ints(count, 0);
        if (r.rank == 1) place.hold(nullptr);
        place.copy(data, source, nullptr);
        const Work work = r.world->all_reduce(data, ReduceOp::sum, {.async_op = async_op});
        if (r.rank == 1) {
          EXPECT_FALSE(work.done());
          place.open();
        }
        order_after(work, nullptr);
        place.copy(result, data, nullptr);
        place.finish(nullptr);
        place.expect_all(result, 3);
      }
    }
  });
}

TEST(DevicesDeviceCalls, ADefaultStreamIsOrderedAfterThatOfAnotherDevice) {
  const harness::RunOptions options{
      .n = 2, .as = harness::As::processes, .backend = "native", .env = {{"HOST_DEVICE_COUNT", "2"}}};
  run_ranks(options, [](Rank& r) {
    Place first(0), second(1);
    const Buffer one = first.ints(kFew, 1);
    const Buffer two = second.ints(kFew, 2);
    second.hold(nullptr);
    const Work held = r.world->all_reduce(two, ReduceOp::sum);
    const Work after = r.world->all_reduce(one, ReduceOp::sum);  // operations run in the order of the calls
    EXPECT_FALSE(held.done());
    EXPECT_FALSE(after.done());
    second.open();
    after.synchronize();
    EXPECT_TRUE(held.done());
    first.expect_all(one, 2);
    second.expect_all(two, 4);
  });
}

TEST(DevicesDeviceCalls, ABatchSendsWhatEveryDeviceHasCopied) {
  const harness::RunOptions options{
      .n = 2, .as = harness::As::processes, .backend = "native", .env = {{"HOST_DEVICE_COUNT", "2"}}};
  run_ranks(options, [](Rank& r) {
    Place first(0), second(1);
    const Buffer one = first.ints(kFew, 0);
    const Buffer two = second.ints(kFew, 0);
    if (r.rank == 1) {
      for (const Work& work : r.world->batch_isend_irecv(
               std::vector{PointToPoint::recv(one, 0, 1), PointToPoint::recv(two, 0, 2)}, {.async_op = true})) {
        work.synchronize();
      }
      first.expect_all(one, 7);
      second.expect_all(two, 8);
      return;
    }
    const Buffer late = first.ints(kFew, 7);
    second.copy(two, second.ints(kFew, 8), nullptr);
    first.hold(nullptr);  // the first device is behind the second, whose copy ends at once
    first.copy(one, late, nullptr);
    const auto works = r.world->batch_isend_irecv(
        std::vector{PointToPoint::send(one, 1, 1), PointToPoint::send(two, 1, 2)}, {.async_op = true});
    works[1].synchronize();
    EXPECT_FALSE(works[0].done());
    first.open();
    works[0].synchronize();
  });
}

TEST_P(DeviceCalls, AreThereInTheCInterface) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    void* const other = place.stream();
    maniple_group group{r.world};
    const Buffer source = place.ints(kFew, r.rank + 1);
    const Buffer data = place.ints(kFew, 0);
    const Buffer result = place.ints(kFew, 0);
    if (r.rank == 1) place.hold(stream);
    place.copy(data, source, stream);
    const maniple_buffer buffer{data.data, data.count, MANIPLE_INT32, MANIPLE_CUDA, 0};
    maniple_call call{};
    call.stream = stream;
    maniple_work* work = nullptr;
    ASSERT_EQ(maniple_all_reduce(&group, &buffer, &buffer, {MANIPLE_SUM, 1}, &call, &work), nullptr);
    ASSERT_EQ(maniple_work_order(work, other), nullptr);
    place.copy(result, data, other);
    if (r.rank == 1) {
      EXPECT_EQ(maniple_work_done(work), 0);
      place.open();
    }
    place.finish(other);
    place.expect_all(result, 3);
    maniple_work_free(work);
  });
}

TEST_P(DeviceCalls, OfSeveralStreamsRunInTheOrderOfTheCalls) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const streams[] = {place.stream(), place.stream()};
    const Buffer data = place.ints(kFew, 1);
    if (r.rank == 0) place.hold(streams[0]);
    Work last;
    for (int turn = 0; turn < 6; ++turn) {
      last = r.world->all_reduce(data, ReduceOp::sum, {.stream = streams[turn % 2]});
    }
    if (r.rank == 0) place.open();
    last.synchronize();
    place.expect_all(data, 64);
  });
}

// What the thread that watches has found to be over is what comes before the hold, all of it, and nothing after.
TEST_P(DeviceCalls, EndInTheOrderOfTheirStream) {
  static constexpr std::size_t kBefore = 37, kAll = 60;
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(10, 0);
    std::atomic<std::size_t> over{0};
    std::vector<Work> works;
    for (std::size_t i = 0; i < kAll; ++i) {
      if (i == kBefore && r.rank == 0) place.hold(stream);
      works.push_back(r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}));
      when_done(works.back(), [&over, i](const std::exception_ptr& error) {
        EXPECT_FALSE(error);
        EXPECT_EQ(over++, i);
      });
    }
    const auto await = [&](std::size_t count) {  // an operation is done a moment before what is called then
      while (over < count) std::this_thread::yield();
    };
    works[kBefore - 1].synchronize();
    await(kBefore);
    r.phase("before");
    EXPECT_EQ(over, kBefore);
    r.phase("held");
    if (r.rank == 0) place.open();
    works.back().synchronize();
    await(kAll);
    EXPECT_EQ(over, kAll);
  });
}

TEST_P(DeviceCalls, OfSeveralThreadsEndOnce) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(10, 1);
    const Buffer sent = place.ints(10, r.rank);
    const Buffer received = place.ints(10, -1);
    std::atomic<int> over{0};
    const auto count = [&](const Work& work) {
      when_done(work, [&over](const std::exception_ptr& error) { over += error ? 0 : 1; });
    };
    std::thread messages([&] {
      for (int i = 0; i < 20; ++i) {
        const Work send = r.world->isend(sent, 1 - r.rank, 3, {.stream = stream});
        count(send);
        count(r.world->irecv(received, 1 - r.rank, 3, nullptr, {.stream = stream}));
      }
    });
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) works.push_back(r.world->all_reduce(data, ReduceOp::max, {.stream = stream}));
    for (const Work& work : works) count(work);
    messages.join();
    const Deadline limit = Deadline::after(std::chrono::seconds(20));
    while (over != 60 && !limit.expired()) ::sched_yield();
    EXPECT_EQ(over, 60);
    place.finish(stream);
    place.expect_all(received, 1 - r.rank);
    place.expect_all(data, 1);
  });
}

// Freeing registered memory waits for all that the device does. The thread that watches, which drops what an operation
// kept, must not: another operation may be waiting for a rank that never comes.
TEST_P(DeviceCalls, TheWatchGoesOnWhenMemoryIsFreed) {
  if (std::string(GetParam()) == "native") return;  // lacks registered memory on a device
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const streams[] = {place.stream(), place.stream()};
    const Buffer data = place.ints(kFew, 1);
    RegisteredMemory memory = r.world->allocate(1000, Device::cuda(0));
    if (r.rank == 1) {
      r.phase("enqueued");
      static_cast<void>(
          catch_error([&] { r.world->all_reduce(data, ReduceOp::sum, {.stream = streams[0]}).synchronize(); }));
      r.phase("over");
      return;
    }
    const Work first = r.world->all_reduce(data, ReduceOp::sum, {.stream = streams[0]});
    when_done(first, [memory](const std::exception_ptr&) {});
    memory = {};
    const Work second =
        r.world->all_reduce(data, ReduceOp::sum, {.timeout = std::chrono::milliseconds(300), .stream = streams[1]});
    r.phase("enqueued");
    const Caught caught = catch_error([&] { second.synchronize(); });
    EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
    EXPECT_EQ(caught.info.ranks, std::vector<int>{1});
    place.finish(streams[1]);
    r.phase("over");
  });
}

TEST_P(DeviceCalls, MoveData) {
  run_ranks(ranks(3), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer one = place.ints(kFew, r.rank);
    const Buffer all = place.ints(3 * kFew, -1);
    r.world->all_gather(one, all, {}, {.stream = stream});
    r.world->broadcast(one, 2, {.stream = stream});
    place.finish(stream);
    place.expect_all(one, 2);
    const std::vector<int> gathered = place.values(all);
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(gathered[static_cast<std::size_t>(rank) * kFew + 7], rank);

    // To the next rank, from the one before.
    const Buffer to = place.ints(kFew, 10 + r.rank);
    const Buffer from = place.ints(kFew, -1);
    const int next = (r.rank + 1) % 3;
    const int before = (r.rank + 2) % 3;
    Work sent = r.world->isend(to, next, 5, {.stream = stream});
    Work received = r.world->irecv(from, before, 5, nullptr, {.stream = stream});
    received.synchronize();
    sent.synchronize();
    place.expect_all(from, 10 + before);
  });
}

// A send has ended, for its sender, when its memory may be used again. A rank that leaves then must not take the
// message with it.
TEST_P(DeviceCalls, MessagesArriveFromARankThatHasLeft) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    constexpr int kMessages = 6;
    for (int i = 0; i < kMessages; ++i) {
      const Buffer message = place.ints(kMany, r.rank == 0 ? i : -1);
      if (r.rank == 0) {
        r.world->isend(message, 1, i, {.stream = stream}).synchronize();
        continue;
      }
      r.world->irecv(message, 0, i, nullptr, {.stream = stream}).synchronize();
      place.expect_all(message, i);
    }
    if (r.rank == 0) r.world.reset();
  });
}

// A receive that is posted first must not hold up the send, which the other rank waits for; nor one that a stream waits
// for already.
TEST_P(DeviceCalls, ReceivesHoldUpNothingThatWasEnqueuedBefore) {
  harness::RunOptions options = ranks(2);
  options.env = {{"HOST_DEVICE_ONE_QUEUE", "1"}};
  run_ranks(options, [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    void* const other = place.stream();
    for (int i = 0; i < 20; ++i) {
      const Buffer to = place.ints(kFew, 2 * i + r.rank);
      const Buffer from = place.ints(kFew, -1), result = place.ints(kFew, -1);
      const Work received = r.world->irecv(from, 1 - r.rank, i, nullptr, {.stream = stream});
      const Work sent = r.world->isend(to, 1 - r.rank, i, {.stream = stream});
      if (i % 4 != 0) order_after(received, other);
      if (i % 4 == 2) order_after(received, stream);
      if (i % 4 == 3) received.synchronize();
      if (i % 4 == 0) received.synchronize();
      place.copy(result, from, i % 4 == 2 ? stream : other);
      place.finish(i % 4 == 2 ? stream : other);
      place.expect_all(result, 2 * i + 1 - r.rank);
      sent.synchronize();
      received.synchronize();
      EXPECT_TRUE(received.done());
    }
  });
}

// Of two receives that never come one has a stream that waits for it; both fail, and the stream goes on.
TEST_P(DeviceCalls, ReceivesOfARankThatGivesUpFail) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer one = place.ints(kFew, -1), two = place.ints(kFew, -1);
    const Work first = r.world->irecv(one, 1 - r.rank, 1, nullptr, {.stream = stream});
    const Work second = r.world->irecv(two, 1 - r.rank, 2, nullptr, {.stream = stream});
    order_after(second, stream);
    EXPECT_FALSE(first.done());
    EXPECT_FALSE(second.done());
    r.phase("posted");
    if (r.rank == 1) r.world->abort("enough");
    for (const Work& work : {first, second}) {
      const Caught caught = catch_error([&] { work.synchronize(); });
      EXPECT_TRUE(harness::contains(caught.text, "enough")) << caught;
      EXPECT_TRUE(catch_error([&] { order_after(work, stream); }).any);
    }
    place.finish(stream);
    r.phase("over");
  });
}

}  // namespace
}  // namespace maniple::device_calls_test
