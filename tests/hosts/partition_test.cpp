// Fault 10: the network between two hosts is gone, with or without a sign. Both sides get an error within seconds.
#include <cstdlib>

#include <fmt/format.h>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

constexpr int kRanks = 4;
constexpr int kHosts = 2;
constexpr double kNoticed = 3.0 + 5.0;  // the goal, and a margin for a busy machine

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

// Fault 11: one host's packets to another vanish, the other way round they arrive, and rank 0 reaches both: no
// heartbeat stops. Whoever waits for the other host notices, whichever of the two gives up the connection first and
// says so to the other.
struct Half {
  const char* name;
  int from, to;      // their packets vanish
  int patient_rank;  // its own limit is longer; -1: none
};

class HalfPartition : public testing::TestWithParam<Half> {};

TEST_P(HalfPartition, BetweenTwoHostsThatRankZeroReaches) {
  run_ranks({.n = 3,
             .as = As::netns,
             .timeout = Seconds(60),
             .limit = Seconds(90),
             .hosts = 3,
             .env = {{"MANIPLE_HEARTBEAT", "1"}}},
            [](Rank& r) {
              const Half& half = GetParam();
              if (r.rank == half.patient_rank) ::setenv("MANIPLE_HEARTBEAT", "3", 1);
              const auto group = r.world->split(0);
              std::vector<float> values(1'000'000, 1.0f);
              group->all_reduce(buffer_of(values));
              group->all_reduce(buffer_of(values));
              r.phase("connected");
              if (r.rank == half.from) {
                const std::string cut = "ip route add blackhole " + r.host_addresses().at(half.to);
                ASSERT_EQ(std::system(cut.c_str()), 0);
              }
              r.phase("cut");
              const Caught caught = catch_error([&] { group->all_reduce(buffer_of(values)); });
              EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
              EXPECT_TRUE(caught.lost_rank == 1 || caught.lost_rank == 2) << caught;
              EXPECT_LT(caught.took, 30) << caught;
            });
}

INSTANTIATE_TEST_SUITE_P(Fault, HalfPartition,
                         testing::Values(Half{"from_1_to_2", 1, 2, -1}, Half{"from_2_to_1", 2, 1, -1},
                                         Half{"from_1_to_2_rank_1_patient", 1, 2, 1},
                                         Half{"from_1_to_2_rank_2_patient", 1, 2, 2},
                                         Half{"from_2_to_1_rank_1_patient", 2, 1, 1},
                                         Half{"from_2_to_1_rank_2_patient", 2, 1, 2}),
                         [](const auto& half) { return half.param.name; });

// A host that answers is there, however long its rank reads nothing and however much is on its way to it.
TEST(Partition, ARankThatReadsNothingIsNotLost) {
  run_ranks({.n = 2,
             .as = As::netns,
             .timeout = Seconds(60),
             .hosts = kHosts,
             .fault = delay_at(1, 1, Seconds(7)),
             .env = {{"MANIPLE_HEARTBEAT", "1"}}},
            [](Rank& r) {
              std::vector<float> values(16'000'000, 1.0f);
              r.world->all_reduce(buffer_of(values));
              r.world->all_reduce(buffer_of(values));
              if (r.rank == 1) r.step();
              r.world->all_reduce(buffer_of(values));
              EXPECT_EQ(values.back(), 8);
            });
}

// Something is always on its way here, and its answer with it: that is not silence, however long it goes on.
TEST(Partition, ALongTransferDoesNotCountAsSilence) {
  run_ranks({.n = 2,
             .as = As::netns,
             .timeout = Seconds(60),
             .hosts = kHosts,
             .rate_mbit = 20,
             .queue_ms = 100,
             .env = {{"MANIPLE_HEARTBEAT", "1"}}},
            [](Rank& r) {
              std::vector<float> values(4'000'000, 1.0f);  // seven seconds
              r.world->all_reduce(buffer_of(values));
              EXPECT_EQ(values.back(), 2);
            });
}

// Who raises the limit, or has none, keeps what the network interrupts for less: at every layer, whether data is on its
// way or the connections are idle.
class Tolerance : public testing::TestWithParam<const char*> {};

TEST_P(Tolerance, BridgesAShortCut) {
  constexpr double kCut = 8;
  run_ranks({.n = kRanks,
             .as = As::netns,
             .timeout = Seconds(90),
             .limit = Seconds(120),
             .hosts = kHosts,
             .fault = delay_at(0, 1, Seconds(kCut)),
             .env = {{"MANIPLE_HEARTBEAT", GetParam()}}},
            [&](Rank& r) {
              const auto idle = r.world->split(0);
              std::vector<float> values(1'000'000, 1.0f);
              idle->all_reduce(buffer_of(values));
              r.world->all_reduce(buffer_of(values));
              r.phase("connected");
              if (r.rank == 0) {
                r.blackhole(1);
                r.step();  // while the others are in the next call
                r.heal(1);
              }
              // A connection that is made during the cut: no rank has sent a message yet.
              int token = r.rank;
              if (r.rank == 1) r.world->recv(buffer_of(token), 2);
              if (r.rank == 2) r.world->send(buffer_of(token), 1);
              EXPECT_EQ(token, r.rank == 1 ? 2 : r.rank);
              std::fill(values.begin(), values.end(), 1.0f);
              r.world->all_reduce(buffer_of(values));
              EXPECT_EQ(values.front(), kRanks);
              idle->all_reduce(buffer_of(values));
              EXPECT_EQ(values.back(), kRanks * kRanks);
              r.phase("all are through");
            });
}

// A slow link with seconds of queue: everything comes late, also the answers to what asks whether the other host is
// there.
TEST_P(Tolerance, AllowsForASlowLink) {
  run_ranks({.n = 2,
             .as = As::netns,
             .timeout = Seconds(100),
             .limit = Seconds(120),
             .hosts = kHosts,
             .rate_mbit = 2,
             .queue_ms = 4800,
             .env = {{"MANIPLE_HEARTBEAT", GetParam()}}},
            [](Rank& r) {
              const auto idle = r.world->split(0);
              int x = 1;
              idle->all_reduce(buffer_of(x));
              std::vector<float> values(600'000, 1.0f);  // ten seconds
              r.world->all_reduce(buffer_of(values));
              EXPECT_EQ(values.front(), 2);
              idle->all_reduce(buffer_of(x));
              EXPECT_EQ(x, 4);
              r.phase("all are through");
            });
}

INSTANTIATE_TEST_SUITE_P(Heartbeat, Tolerance, testing::Values("0", "60"),
                         [](const auto& limit) { return fmt::format("of_{}_s", limit.param); });

}  // namespace
}  // namespace maniple::harness
