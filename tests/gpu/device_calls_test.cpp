// Operations of a group on memory of a device, in the order of streams, and what becomes of them when the group fails. With a GPU, or with
// host_device_plugin.cpp in its place.
#include <gtest/gtest.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "backend/plugin/load.h"
#include "fault/expect_error.h"
#include "group/work_state.h"
#include "harness/run_ranks.h"

namespace maniple::device_calls_test {
namespace {

using harness::As;
using harness::catch_error;
using harness::Caught;
using harness::Rank;
using harness::RunOptions;

constexpr std::size_t kFew = 1000;
constexpr std::size_t kMany = 3'000'000;  // through memory of the host: in several pieces

/// Streams and memory of one rank.
class Place {
 public:
  ~Place() {
    for (void* stream : streams_) runtime_.free_stream(stream);
    for (std::byte* memory : memory_) runtime_.free_memory(memory);
    for (std::byte* memory : pinned_) runtime_.free_pinned(memory);
  }
  DeviceRuntime& runtime() { return runtime_; }
  void* stream() {
    streams_.push_back(runtime_.make_stream(0));
    return streams_.back();
  }
  /// Memory of the device, all of one value. Waits for a stream of its own alone.
  Buffer ints(std::size_t count, int value) {
    memory_.push_back(runtime_.make_memory(0, count * sizeof(int)));
    auto* const data = reinterpret_cast<int*>(memory_.back());
    int* const values = on_host(count);
    std::fill(values, values + count, value);
    runtime_.copy(data, values, count * sizeof(int), copies_);
    finish(copies_);
    return {data, count, DType::int32, Device::cuda(0)};
  }
  /// What it holds now. The stream that writes it has been waited for.
  std::vector<int> values(const Buffer& buffer) {
    int* const values = on_host(buffer.count);
    runtime_.copy(values, buffer.data, buffer.bytes(), copies_);
    finish(copies_);
    return {values, values + buffer.count};
  }
  void expect_all(const Buffer& buffer, int value) {
    const std::vector<int> found = values(buffer);
    const auto other = std::find_if(found.begin(), found.end(), [&](int one) { return one != value; });
    if (other == found.end()) return;
    ADD_FAILURE() << "element " << other - found.begin() << " of " << found.size() << " is " << *other << ", not "
                  << value;
  }
  /// What follows in the stream waits for `open`.
  void hold(void* stream) {
    word_ = reinterpret_cast<std::uint32_t*>(on_host(1));
    *word_ = 0;
    runtime_.wait_for_bits(stream, word_, 1);
  }
  void open() { std::atomic_ref<std::uint32_t>(*word_).store(1); }

  void copy(const Buffer& to, const Buffer& from, void* stream) {
    runtime_.copy(to.data, from.data, to.bytes(), stream);
  }
  /// Waits until the stream has got to its end.
  void finish(void* stream) {
    void* const event = runtime_.make_event(0);
    runtime_.record(event, stream);
    const Deadline limit = Deadline::after(std::chrono::seconds(20));
    while (!runtime_.reached(event)) {
      if (limit.expired()) throw std::runtime_error("the stream does not get to its end");
      ::sched_yield();
    }
    runtime_.free_event(event);
  }

 private:
  int* on_host(std::size_t count) {
    pinned_.push_back(runtime_.make_pinned(count * sizeof(int)));
    return reinterpret_cast<int*>(pinned_.back());
  }

  DeviceRuntime& runtime_ = device_runtime();
  std::vector<void*> streams_;
  void* const copies_ = stream();
  std::vector<std::byte*> memory_, pinned_;
  std::uint32_t* word_ = nullptr;
};

class DeviceCalls : public testing::TestWithParam<const char*> {
 protected:
  static RunOptions ranks(int n) { return {.n = n, .as = As::processes, .backend = GetParam()}; }
};
// An engine for the device, and none.
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

// Freeing registered memory waits for all that the device does. The thread that watches, which drops what an operation kept, must not:
// another operation may be waiting for a rank that never comes.
TEST_P(DeviceCalls, TheWatchGoesOnWhenMemoryIsFreed) {
  if (std::string(GetParam()) == "native") return;  // has no such memory on a device
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

TEST_P(DeviceCalls, ALateRankIsNamed) {
  run_ranks(ranks(3), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    if (r.rank == 1) {
      r.phase("over");
      return;
    }
    const Work work =
        r.world->all_reduce(data, ReduceOp::sum, {.timeout = std::chrono::milliseconds(300), .stream = stream});
    const Caught caught = catch_error([&] { work.synchronize(); });
    // The rest of the group hears of it from the first whose time is over.
    EXPECT_TRUE(caught.is_one_of({ErrorKind::timeout, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(harness::contains(caught.text, "waiting for rank 1")) << caught;
    EXPECT_EQ(caught.info.ranks, std::vector<int>{1});
    place.finish(stream);
    r.phase("over");
  });
}

TEST_P(DeviceCalls, DifferentCallsAreAMismatch) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    Buffer part = data;
    if (r.rank == 1) part.count = kFew / 2;
    const Work work = r.world->all_reduce(part, ReduceOp::sum, {.stream = stream});
    const Caught caught = catch_error([&] { work.synchronize(); });
    EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
    place.finish(stream);
    r.phase("over");
  });
}

TEST_P(DeviceCalls, AbortEndsWhatIsEnqueued) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    if (r.rank == 1) {
      r.phase("enqueued");
      r.world->abort("it is enough");
      r.phase("over");
      return;
    }
    std::vector<Work> works;
    for (int i = 0; i < 5; ++i) works.push_back(r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}));
    r.phase("enqueued");
    for (const Work& work : works) {
      const Caught caught = catch_error([&] { work.synchronize(); });
      EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
      EXPECT_TRUE(harness::contains(caught.text, "it is enough")) << caught;
    }
    place.finish(stream);
    EXPECT_TRUE(catch_error([&] { r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}); }).any);
    r.phase("over");
  });
}

/// What the rank that is killed does at that time: nothing; waits for others in an operation; has called it, but its stream is busy.
enum class Doing { nothing, waiting, busy };

void be_killed(Rank& r, Place& place, void* stream, const Buffer& data, Doing doing) {
  if (doing == Doing::busy) place.hold(stream);
  if (doing != Doing::nothing) r.world->all_reduce(data, ReduceOp::sum, {.stream = stream});
  r.phase("enqueued");
  ::raise(SIGKILL);
}

/// The others name it and begin anew, without it.
void kill_a_rank(RunOptions options, Doing doing) {
  options.expect_dead = {0};
  run_ranks(options, [doing](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    if (r.rank == 0) be_killed(r, place, stream, data, doing);
    Work work;
    // Rank 1 comes late, or the dead one would not have waited for anybody. What the dead one has given already may be enough for an
    // operation on the host, but not for the next.
    if (r.rank == 2) work = r.world->all_reduce(data, ReduceOp::sum, {.stream = stream});
    r.phase("enqueued");
    const double began = harness::now_s();
    const Caught caught = catch_error([&] {
      if (r.rank == 2) work.synchronize();
      for (;;) r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    });
    EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
    EXPECT_EQ(caught.lost_rank, 0) << caught;
    r.report("noticed", harness::now_s() - began);
    place.finish(stream);
    r.world.reset();
    InitOptions again = r.init_options();
    again.init_method = "file://" + r.dir() + "/again";
    again.rank = r.rank - 1;
    again.world_size = 2;
    r.init(again);
    const Buffer fresh = place.ints(kFew, 1);
    r.world->all_reduce(fresh, ReduceOp::sum, {.stream = stream}).synchronize();
    place.expect_all(fresh, 2);
    place.finish(stream);
  });
}

TEST_P(DeviceCalls, AnIdleRankIsKilled) { kill_a_rank(ranks(3), Doing::nothing); }
TEST_P(DeviceCalls, ABusyRankIsKilled) { kill_a_rank(ranks(3), Doing::busy); }
TEST_P(DeviceCalls, AWaitingRankIsKilled) { kill_a_rank(ranks(3), Doing::waiting); }

TEST_P(DeviceCalls, AGroupIsDestroyedWithOperationsUnderWay) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    auto group = r.world->split(0);
    Work work;
    if (r.rank == 0) work = group->all_reduce(data, ReduceOp::sum, {.stream = stream});
    r.phase("enqueued");
    group.reset();
    if (r.rank == 0) {
      EXPECT_TRUE(catch_error([&] { work.synchronize(); }).any);
    }
    place.finish(stream);
    r.phase("over");
  });
}

}  // namespace
}  // namespace maniple::device_calls_test
