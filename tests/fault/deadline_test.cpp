// A rank that does not come is named, and one operation has one deadline however many steps it takes.
#include <algorithm>

#include "comm/group/matrix.h"
#include "fault/expect_error.h"

namespace maniple::harness {
namespace {

class DeadlineTest : public Operations {};
INSTANTIATE_TEST_SUITE_P(Few, DeadlineTest, testing::ValuesIn(places({2, 5, 8})), name_of);

constexpr double kLimit = 0.5;
CallOptions limited(bool async_op = false) { return {.timeout = Seconds(kLimit), .async_op = async_op}; }

// The first rank whose deadline passes ends the operation for all: others, who started a little later, may hear of it
// before their own deadline.
void expect_timeout(const Caught& caught, int late) {
  EXPECT_TRUE(caught.is_one_of({ErrorKind::timeout, ErrorKind::aborted})) << caught;
  EXPECT_TRUE(names_rank(caught.text, late)) << caught;
  EXPECT_EQ(std::count(caught.info.ranks.begin(), caught.info.ranks.end(), late), 1) << caught;
  EXPECT_GE(caught.info.waited_s, kLimit * 0.5) << caught;
  EXPECT_FALSE(caught.info.operation.empty()) << caught;
  EXPECT_LT(caught.took, kLimit + 2.0 * kSlowdown) << "one deadline for the whole operation";
}

// Everyone but `late` makes the call and gets a Timeout that names it; when `late` makes it, it gets the error.
void run_with_late_rank(Rank& r, int late, const std::function<void()>& call) {
  r.world->barrier();
  if (r.rank != late) {
    const Caught caught = catch_error(call);
    expect_timeout(caught, late);
    if (caught.is(ErrorKind::timeout)) r.report("timed out", caught.took);
  }
  r.phase("all others have given up");
  if (r.rank == late) {
    const Caught caught = catch_error(call);
    // Messages that the others sent before they gave up have arrived, so over a network this call may find all it
    // needs.
    if (r.world->transport() != "tcp") {
      EXPECT_TRUE(caught.any);
    }
    EXPECT_LT(caught.took, kLimit + 2.0 * kSlowdown);
  }
  expect_aborted_from_now_on(r);
}

void expect_somebody_timed_out(const RunResult& result) {
  if (!result) return;
  const auto times = result.numbers("timed out");
  EXPECT_FALSE(times.empty());
  for (const auto& [rank, took] : times) EXPECT_GE(took, kLimit * 0.5) << "rank " << rank;
}

TEST_P(DeadlineTest, AllReduceNamesTheLateRank) {
  const auto result = run([](Rank& r) {
    std::vector<float> x(10'000);
    run_with_late_rank(r, r.size - 1, [&] { r.world->all_reduce(buffer_of(x), ReduceOp::sum, limited()); });
  });
  expect_somebody_timed_out(result);
}

TEST_P(DeadlineTest, LargeAllReduceNamesTheLateRank) {
  const auto result = run([](Rank& r) {
    std::vector<float> x(1'000'000);
    run_with_late_rank(r, r.size / 2, [&] { r.world->all_reduce(buffer_of(x), ReduceOp::sum, limited()); });
  });
  expect_somebody_timed_out(result);
}

TEST_P(DeadlineTest, BarrierNamesTheLateRank) {
  const auto result = run([](Rank& r) { run_with_late_rank(r, 0, [&] { r.world->barrier(limited()); }); });
  expect_somebody_timed_out(result);
}

TEST_P(DeadlineTest, AllToAllNamesTheLateRank) {
  const auto result = run([](Rank& r) {
    std::vector<float> x(100 * r.size), y(100 * r.size);
    run_with_late_rank(r, r.size - 1, [&] { r.world->all_to_all(buffer_of(x), buffer_of(y), {}, {}, limited()); });
  });
  expect_somebody_timed_out(result);
}

TEST_P(DeadlineTest, AsynchronousCallHasItsDeadlineToo) {
  const auto result = run([](Rank& r) {
    std::vector<float> x(1000);
    run_with_late_rank(r, 1, [&] { r.world->all_reduce(buffer_of(x), ReduceOp::sum, limited(true)).wait(); });
  });
  expect_somebody_timed_out(result);
}

TEST_P(DeadlineTest, RecvNamesTheSilentSender) {
  run([](Rank& r) {
    r.world->barrier();
    int x = 0;
    if (r.rank == 0) {
      const Caught caught = catch_error([&] { r.world->recv(buffer_of(x), 1, 0, limited()); });
      EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
      EXPECT_GE(caught.took, kLimit * 0.9);
      expect_timeout(caught, 1);
    }
    r.phase("rank 0 has given up");
  });
}

TEST_P(DeadlineTest, GroupHasALimitOfItsOwn) {
  run([](Rank& r) {
    const auto group = r.world->split(0, 0, {.timeout = Seconds(kLimit), .transport = {}, .algorithm = {}});
    group->barrier({.timeout = Seconds(30)});
    if (r.rank != 0) expect_timeout(catch_error([&] { group->barrier(); }), 0);
    r.phase("others have given up");
    int x = 1;
    r.world->all_reduce(buffer_of(x));  // the world is another group and goes on
    EXPECT_EQ(x, r.size);
  });
}

TEST_P(DeadlineTest, ALateRankWithinTheDeadlineIsAccepted) {
  const Place place = GetParam();
  run_ranks(
      {.n = place.n, .as = place.as, .transport = place.transport, .fault = delay_at(place.n - 1, 2, Seconds(0.5))},
      [](Rank& r) {
        for (int i = 0; i < 4; ++i) {
          r.step();
          int x = 1;
          r.world->all_reduce(buffer_of(x));
          EXPECT_EQ(x, r.size);
        }
      });
}

}  // namespace
}  // namespace maniple::harness
