// Fault 10: the network between two hosts is gone, with or without a sign. Both sides are told within seconds.
#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

constexpr int kRanks = 4;
constexpr int kHosts = 2;
constexpr double kNoticed = 3.0 + 1.5;  // the goal, and a margin for a busy machine

// Host 1 is cut off before `work`, which cannot succeed then.
void run_cut(bool silent, const std::function<void(Rank&)>& work) {
  const RunResult result = run_ranks({.n = kRanks, .as = As::netns, .hosts = kHosts}, [&](Rank& r) {
    std::vector<float> warm(1000);
    r.world->all_reduce(buffer_of(warm));
    r.phase("connected");
    if (r.rank == 0) silent ? r.blackhole(1) : r.unplug(1);
    r.phase("cut");
    const Caught caught = catch_error([&] { work(r); });
    EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
    EXPECT_LT(caught.took, kNoticed) << caught;
    EXPECT_NE(caught.lost_rank / (kRanks / kHosts), r.host) << "the lost rank is on the other side: " << caught;
    r.report("took", caught.took);
    expect_aborted_from_now_on(r);
  });
  if (result) {
    EXPECT_EQ(result.numbers("took").size(), static_cast<std::size_t>(kRanks));
  }
}

TEST(Partition, SilentDuringAnAllReduce) {
  run_cut(true, [](Rank& r) {
    std::vector<float> values(1'000'000, 1.0f);
    r.world->all_reduce(buffer_of(values));
  });
}

TEST(Partition, UnpluggedDuringAnAllReduce) {
  run_cut(false, [](Rank& r) {
    std::vector<float> values(1'000'000, 1.0f);
    r.world->all_reduce(buffer_of(values));
  });
}

TEST(Partition, SilentDuringABarrier) {
  run_cut(true, [](Rank& r) { r.world->barrier(); });
}

TEST(Partition, SubGroupInsideAHostGoesOn) {
  run_ranks({.n = kRanks, .as = As::netns, .hosts = kHosts}, [](Rank& r) {
    const auto local = r.world->split(r.host);
    r.world->barrier();
    r.phase("connected");
    if (r.rank == 0) r.blackhole(1);
    r.phase("cut");
    const Caught caught = catch_error([&] { r.world->barrier(); });
    EXPECT_TRUE(caught.any);
    int value = 1;
    local->all_reduce(buffer_of(value));
    EXPECT_EQ(value, kRanks / kHosts);
  });
}

}  // namespace
}  // namespace maniple::harness
