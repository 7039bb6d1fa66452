// Fault 3: a rank is stopped. The heartbeat tells the others; a short stop is not a fault.
#include <sys/types.h>

#include <csignal>
#include <thread>

#include <fmt/format.h>

#include "fault/expect_error.h"
#include "fault/ways.h"

namespace maniple::harness {
namespace {

class Stop : public EveryTransport {};
INSTANTIATE_TEST_SUITE_P(Faults, Stop, process_transports(), transport_name);

constexpr int kVictim = 2;

TEST_P(Stop, IsNoticedByHeartbeat) {
  const auto result =
      run_ranks({.n = 4, .as = As::processes, .transport = GetParam(), .fault = stop_at(kVictim, 10)}, [](Rank& r) {
        std::vector<float> values(1000, 1.0f);
        const Caught caught = catch_error([&] {
          for (;;) {
            r.step();
            r.world->all_reduce(buffer_of(values), ReduceOp::max);
          }
        });
        r.report("noticed_at", now_s());
        EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
        EXPECT_EQ(caught.lost_rank, kVictim);
        EXPECT_TRUE(names_rank(caught.text, kVictim)) << caught;
        EXPECT_TRUE(names_call(caught.text, "all_reduce", r)) << caught;
        expect_aborted_from_now_on(r);
      });
  if (!result) return;
  const double fault_at_s = result.numbers("fault_at").at(kVictim);
  EXPECT_EQ(result.numbers("noticed_at").size(), 3u);
  for (const auto& [rank, when] : result.numbers("noticed_at"))
    EXPECT_LT(when - fault_at_s, 8.0) << "rank " << rank << ", 3 s but for a machine that holds it up";
}

TEST_P(Stop, OfLessThanTheLimitIsTolerated) {
  run_ranks({.n = 3, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    r.world->barrier();
    int value = 1;
    if (r.rank == 0) {
      const Work work = r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true});
      ASSERT_EQ(::kill(r.pid_of(1), SIGSTOP), 0);
      std::this_thread::sleep_for(std::chrono::seconds(2));  // sleep: the pause itself is the fault
      ASSERT_EQ(::kill(r.pid_of(1), SIGCONT), 0);
      work.wait();
    } else {
      r.world->all_reduce(buffer_of(value));
    }
    EXPECT_EQ(value, 3);
    r.world->barrier();
  });
}

TEST_P(Stop, AResumedRankLearnsThatTheGroupFailed) {
  run_ranks({.n = 3, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    r.world->barrier();
    if (r.rank == 1) r.stop_self();
    // Over a network the continued rank finds the others' messages of the first barrier; of the second there are none.
    const Caught caught = catch_error([&] {
      r.world->barrier();
      r.world->barrier();
    });
    EXPECT_TRUE(caught.any);
    if (r.rank != 1) {
      EXPECT_EQ(caught.lost_rank, 1) << caught;
      r.world->store().set(fmt::format("noticed {}", r.rank), "yes");
      const std::vector<std::string> both = {"noticed 0", "noticed 2"};
      if (r.rank == 0) {
        r.world->store().wait(both, Deadline::after(std::chrono::seconds(20)));
        ::kill(r.pid_of(1), SIGCONT);
      }
    }
    r.phase("all have noticed");
  });
}

}  // namespace
}  // namespace maniple::harness
