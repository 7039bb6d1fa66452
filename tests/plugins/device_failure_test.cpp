// What becomes of a group's operations on device memory when a rank is late, calls something else, leaves or dies.
// With a GPU, or with host_device_plugin.cpp in its place.
#include <csignal>
#include <thread>

#include "fault/expect_error.h"
#include "plugins/device_place.h"

namespace maniple::device_calls_test {
namespace {

using harness::catch_error;
using harness::Caught;
using harness::Rank;
using harness::RunOptions;

class DeviceCallsFailure : public EachBackend {};
INSTANTIATE_TEST_SUITE_P(Backend, DeviceCallsFailure, testing::Values("cuda", "native"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(DeviceCallsFailure, ALateRankIsNamed) {
  run_ranks(ranks(3), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    if (r.rank == 1) {
      r.phase("over");
      return;
    }
    const Work work = r.world->all_reduce(data, ReduceOp::sum, {.timeout = std::chrono::seconds(2), .stream = stream});
    const Caught caught = catch_error([&] { work.synchronize(); });
    // The rest of the group hears of it from the first whose time is over.
    EXPECT_TRUE(caught.is_one_of({ErrorKind::timeout, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(harness::contains(caught.text, "waiting for rank 1")) << caught;
    EXPECT_EQ(caught.info.ranks, std::vector<int>{1});
    place.finish(stream);
    r.phase("over");
  });
}

/// The error of ranks of which one sums fewer elements, as their second call after two of the set-up.
Caught sum_different_counts(Rank& r) {
  Place place;
  void* const stream = place.stream();
  const Buffer data = place.ints(kFew, 1);
  r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
  Buffer part = data;
  if (r.rank == 1) part.count = kFew / 2;
  const Work work = r.world->all_reduce(part, ReduceOp::sum, {.stream = stream});
  Caught caught = catch_error([&] { work.synchronize(); });
  EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
  place.finish(stream);
  r.phase("over");
  return caught;
}

TEST_P(DeviceCallsFailure, DifferentCallsAreAMismatch) {
  run_ranks(ranks(2), [](Rank& r) { sum_different_counts(r); });
}

// Where an engine compares nothing, ranks that call different things wait for each other; when the time is over they
// are asked.
TEST(UncomparedDeviceCalls, DifferentCallsAreAMismatch) {
  RunOptions options{.n = 3, .as = harness::As::processes, .backend = "cuda", .timeout = std::chrono::seconds(2)};
  options.env = {{"MANIPLE_CHECKS", "0"}};
  harness::run_ranks(options, [](Rank& r) {
    const Caught caught = sum_different_counts(r);
    EXPECT_TRUE(harness::contains(caught.text, "rank 1: all_reduce #4 int32[500]")) << caught;
    EXPECT_EQ(caught.info.calls.size(), 3U) << caught;
  });
}

// Where an engine does not know which rank is missing either.
TEST(UncomparedDeviceCalls, ALateRankIsNamed) {
  RunOptions options{.n = 3, .as = harness::As::processes, .backend = "cuda", .timeout = std::chrono::seconds(2)};
  options.env = {{"MANIPLE_CHECKS", "0"}};
  harness::run_ranks(options, [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    const auto pair = r.world->new_group(std::vector<int>{0, 2});
    if (r.rank == 0) {
      const Caught caught =
          catch_error([&] { pair->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize(); });
      EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
      EXPECT_EQ(caught.info.ranks, std::vector<int>{2}) << caught;
      EXPECT_TRUE(harness::contains(caught.text, "1 of 2 ranks arrived, waiting for rank 2")) << caught;
      EXPECT_FALSE(harness::contains(caught.text, "] [")) << caught;
    }
    place.finish(stream);
    r.phase("over");
  });
}

// Rank 1 is in an operation on the host, the others in one on the device: no engine sees both.
TEST_P(DeviceCallsFailure, ACallOnTheHostBesideCallsOnTheDeviceIsAMismatch) {
  run_ranks(ranks(3), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    const Caught caught = catch_error([&] {
      if (r.rank == 1) {
        r.world->barrier();
      } else {
        for (int i = 0; i < 3; ++i) r.world->all_reduce(data, ReduceOp::sum, {.stream = stream});
        place.finish(stream);
        r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
      }
    });
    EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
    EXPECT_TRUE(harness::contains(caught.text, "rank 1: barrier #")) << caught;
    EXPECT_TRUE(harness::contains(caught.text, "rank 2: all_reduce #")) << caught;
    place.finish(stream);
    r.phase("over");
  });
}

// Nobody waits for an operation that is enqueued: the first call that notices its failure throws it as it is.
TEST_P(DeviceCallsFailure, AFailureThatNobodySawIsThrownByTheNextCall) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    Buffer part = data;
    if (r.rank == 1) part.count = kFew / 2;
    const Caught first = catch_error([&] {  // the second call may notice it, or one after all have ended
      for (int i = 0; i < 3; ++i) r.world->all_reduce(part, ReduceOp::sum, {.stream = stream});
      place.finish(stream);
      for (;;) r.world->all_reduce(data, ReduceOp::sum, {.stream = stream});
    });
    EXPECT_TRUE(first.is(ErrorKind::mismatch)) << first;
    const Caught second = catch_error([&] { r.world->barrier(); });
    EXPECT_TRUE(second.is(ErrorKind::aborted)) << second;
    place.finish(stream);
    r.phase("over");
  });
}

TEST_P(DeviceCallsFailure, ATimeOutThatNobodySawIsThrownByTheNextCall) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}).synchronize();
    if (r.rank == 0) {
      r.world->all_reduce(data, ReduceOp::sum, {.timeout = std::chrono::milliseconds(300), .stream = stream});
      place.finish(stream);
      const Caught caught = catch_error([&] { r.world->all_reduce(data, ReduceOp::sum, {.stream = stream}); });
      EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
      EXPECT_EQ(caught.info.ranks, std::vector<int>{1}) << caught;
    }
    r.phase("over");
  });
}

TEST_P(DeviceCallsFailure, AbortEndsWhatIsEnqueued) {
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

/// What the rank that is killed does at that time: nothing; waits for others in an operation; has called it, but its
/// stream is busy.
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
    // Rank 1 comes late, or the dead one would not have waited for anybody. What the dead one has given already may be
    // enough for an operation on the host, but not for the next.
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

TEST_P(DeviceCallsFailure, AnIdleRankIsKilled) { kill_a_rank(ranks(3), Doing::nothing); }
TEST_P(DeviceCallsFailure, ABusyRankIsKilled) { kill_a_rank(ranks(3), Doing::busy); }
TEST_P(DeviceCallsFailure, AWaitingRankIsKilled) { kill_a_rank(ranks(3), Doing::waiting); }

TEST_P(DeviceCallsFailure, AGroupIsDestroyedWithOperationsUnderWay) {
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

// An operation is done for its caller when it is enqueued: who leaves then has not let the others down.
TEST_P(DeviceCallsFailure, AGroupIsLeftBeforeAnotherRankCalls) {
  run_ranks(ranks(2), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, r.rank + 1);
    auto group = r.world->split(0);
    // sleep: this rank is late, by more than a rank waits for what others will never call
    if (r.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    group->all_reduce(data, ReduceOp::sum, {.stream = stream});
    group.reset();
    place.finish(stream);
    place.expect_all(data, 3);
    r.phase("over");
  });
}

// What a rank has enqueued is waited for before it leaves; what the others enqueue after that has nobody to wait for.
TEST_P(DeviceCallsFailure, ARankThatLeftIsNamed) {
  for (const int leaver : {0, 2}) {
    run_ranks(ranks(3), [leaver](Rank& r) {
      Place place;
      void* const stream = place.stream();
      const Buffer data = place.ints(kFew, 1);
      for (int i = 0; i < 2; ++i) r.world->all_reduce(data, ReduceOp::sum, {.stream = stream});
      if (r.rank == leaver) {
        r.world.reset();
        place.finish(stream);
        place.expect_all(data, 9);
        r.phase("over");
        return;
      }
      const Work work = r.world->all_reduce(data, ReduceOp::sum, {.stream = stream});
      const Caught caught = catch_error([&] { work.synchronize(); });
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_EQ(caught.info.loss, LossKind::left) << caught;
      EXPECT_EQ(caught.lost_rank, leaver) << caught;
      place.finish(stream);
      r.phase("over");
    });
  }
}

// Setting up ends on all ranks, or on none: those that leave at once have given the others what they need.
TEST_P(DeviceCallsFailure, AGroupIsLeftAtOnce) {
  run_ranks(ranks(4), [](Rank& r) {
    for (int i = 0; i < 20; ++i) r.world->split(0).reset();
    r.world.reset();
  });
}

TEST_P(DeviceCallsFailure, ARankThatLeftASubGroupIsNamed) {
  run_ranks(ranks(3), [](Rank& r) {
    Place place;
    void* const stream = place.stream();
    const Buffer data = place.ints(kFew, 1);
    auto group = r.world->split(0);
    group->all_reduce(data, ReduceOp::sum, {.stream = stream});
    if (r.rank == 1) {
      group.reset();
    } else {
      const Work work = group->all_reduce(data, ReduceOp::sum, {.stream = stream});
      const Caught caught = catch_error([&] { work.synchronize(); });
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_EQ(caught.info.loss, LossKind::left) << caught;
      EXPECT_EQ(caught.lost_rank, 1) << caught;
      group.reset();
    }
    place.finish(stream);
    const Buffer more = place.ints(kFew, 1);
    r.world->all_reduce(more, ReduceOp::sum, {.stream = stream}).synchronize();  // the world goes on
    place.expect_all(more, 3);
    r.phase("over");
  });
}

}  // namespace
}  // namespace maniple::device_calls_test
