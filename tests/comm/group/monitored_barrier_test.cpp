// The barrier that names who is missing and leaves the group usable.
#include <limits>

#include <fmt/format.h>

#include <maniple/comm/error.h>

#include "comm/group/matrix.h"

namespace maniple::harness {
namespace {

class MonitoredBarrier : public Operations {};
INSTANTIATE_TEST_SUITE_P(Few, MonitoredBarrier, testing::ValuesIn(places({2, 4, 8})), name_of);

TEST_P(MonitoredBarrier, PassesWhenAllCome) {
  run([](Rank& r) {
    for (int round = 0; round < 10; ++round) r.world->monitored_barrier(Seconds(60));
  });
}

TEST_P(MonitoredBarrier, NamesTheMissingAndLeavesTheGroupUsable) {
  run([](Rank& r) {
    const int missing = r.size - 1;
    if (r.rank != missing) {
      try {
        r.world->monitored_barrier(Seconds(0.3));
        ADD_FAILURE() << "passed without rank " << missing;
      } catch (const Timeout& error) {
        EXPECT_NE(std::string(error.what()).find(std::to_string(missing)), std::string::npos) << error.what();
      }
    }
    r.phase("all others have timed out");
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, r.size);
  });
}

TEST_P(MonitoredBarrier, LeavesNoKeysBehindAlsoWhenSomeFailed) {
  run([](Rank& r) {
    constexpr int kFailing = 5;
    std::vector<std::string> keys;
    for (int number = 1; number <= kFailing; ++number) {
      keys.push_back(fmt::format("monitored/{}/{}", number, r.rank));
      // Rank 0 comes when the others have given up, and passes.
      if (r.rank == 0) r.phase(std::to_string(number));
      if (r.rank == 0) {
        r.world->monitored_barrier(Seconds(30));
      } else {
        EXPECT_THROW(r.world->monitored_barrier(Seconds(0)), Timeout);
        r.phase(std::to_string(number));
      }
      r.phase(fmt::format("{} is over", number));
    }
    EXPECT_TRUE(r.world->store().check(keys)[kFailing - 1]);
    r.world->monitored_barrier(Seconds(30));
    EXPECT_EQ(r.world->store().check(keys), std::vector<bool>(kFailing, false));
    r.phase("all have looked");
  });
}

TEST_P(MonitoredBarrier, InvalidLimitsAreRefusedAndTheNextBarrierPasses) {
  run([](Rank& r) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_THROW(r.world->monitored_barrier(Seconds(-1)), InvalidArgument);
    EXPECT_THROW(r.world->monitored_barrier(Seconds(nan)), InvalidArgument);
    r.world->monitored_barrier(Seconds(60));
    // One rank alone: the others miss it, by their own limits.
    if (r.rank == 0) {
      EXPECT_THROW(r.world->monitored_barrier(Seconds(-2)), InvalidArgument);
    } else {
      EXPECT_THROW(r.world->monitored_barrier(Seconds(0.2)), Timeout);
    }
    r.world->monitored_barrier(Seconds(60));
  });
}

TEST(MonitoredBarrierOfProcesses, ALostRankIsNamedLongBeforeTheLimit) {
  run_ranks({.n = 3, .as = As::processes, .expect_dead = {2}}, [](Rank& r) {
    r.phase("all have joined");
    if (r.rank == 2) r.kill_self();
    try {
      r.world->monitored_barrier(std::chrono::hours(1));
      ADD_FAILURE() << "passed without rank 2";
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.rank(), 2) << lost.what();
    }
  });
}

}  // namespace
}  // namespace maniple::harness
