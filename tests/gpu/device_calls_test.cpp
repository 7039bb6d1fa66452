// Operations of a group on memory of a device, in the order of streams, and what becomes of them when the group fails. With a GPU, or with
// host_device_plugin.cpp in its place: memory is pinned, which both the device and this test can reach.
#include <gtest/gtest.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <stdexcept>
#include <vector>

#include "backend/plugin/load.h"
#include "fault/expect_error.h"
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
    for (std::byte* memory : memory_) runtime_.free_pinned(memory);
  }
  DeviceRuntime& runtime() { return runtime_; }
  void* stream() {
    streams_.push_back(runtime_.make_stream(0));
    return streams_.back();
  }
  /// All of one value.
  Buffer ints(std::size_t count, int value) {
    memory_.push_back(runtime_.make_pinned(count * sizeof(int)));
    auto* const data = reinterpret_cast<int*>(memory_.back());
    std::fill(data, data + count, value);
    return {data, count, DType::int32, Device::cuda(0)};
  }
  /// What follows in the stream waits for `open`.
  void hold(void* stream) {
    memory_.push_back(runtime_.make_pinned(sizeof(std::uint32_t)));
    word_ = reinterpret_cast<std::uint32_t*>(memory_.back());
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
  DeviceRuntime& runtime_ = device_runtime();
  std::vector<void*> streams_;
  std::vector<std::byte*> memory_;
  std::uint32_t* word_ = nullptr;
};

void expect_all(const Buffer& buffer, int value) {
  const auto* const data = static_cast<const int*>(buffer.data);
  for (std::size_t i = 0; i < buffer.count; ++i) {
    if (data[i] != value) {
      ADD_FAILURE() << "element " << i << " of " << buffer.count << " is " << data[i] << ", not " << value;
      return;
    }
  }
}

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
        expect_all(result, 6);
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
    expect_all(data, 64);
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
    expect_all(one, 2);
    const auto* const gathered = static_cast<const int*>(all.data);
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
    expect_all(from, 10 + before);
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
    expect_all(fresh, 2);
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
