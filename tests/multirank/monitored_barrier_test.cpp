// The barrier that names who is missing and leaves the group usable.
#include <maniple/comm/error.h>

#include "multirank/matrix.h"

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
