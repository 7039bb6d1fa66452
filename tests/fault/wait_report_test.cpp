// A rank that lives but does not come to an operation: after a while the others report which ranks they wait for, and
// then ever more rarely.
#include <chrono>
#include <thread>

#include "comm/group/named_groups.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

struct How {
  As as;
  TransportKind transport;
};
class WaitReport : public testing::TestWithParam<How> {
 protected:
  RunOptions options(int n) const {
    RunOptions run;
    run.n = n;
    run.as = GetParam().as;
    run.transport = GetParam().transport;
    run.env = {{"MANIPLE_WAIT_REPORT", "0.5"}};
    return run;
  }

  // All that the ranks have logged.
  std::string logged(const RunOptions& run, const std::function<void(Rank&)>& body) const {
    const bool here = run.as == As::threads;
    if (here) testing::internal::CaptureStderr();
    const auto result = run_ranks(run, [&](Rank& r) {
      if (!here) testing::internal::CaptureStderr();
      body(r);
      if (!here) r.report("log", testing::internal::GetCapturedStderr());
    });
    std::string log = here ? testing::internal::GetCapturedStderr() : "";
    for (const auto& [rank, text] : result.texts("log")) log += text;
    return log;
  }
};

std::string name_of(const testing::TestParamInfo<How>& how) {
  return std::string(to_string(how.param.as)) + "_" + std::string(to_string(how.param.transport));
}
INSTANTIATE_TEST_SUITE_P(Faults, WaitReport,
                         testing::Values(How{As::threads, TransportKind::loopback},
                                         How{As::processes, TransportKind::shm},
                                         How{As::processes, TransportKind::tcp}),
                         name_of);

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

constexpr int kLate = 1;

void come_late() {
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // sleep: being late is the fault
}

// A rank that does not come to make a group is named, too.
TEST_P(WaitReport, MakingAGroupNamesMissingRanks) {
  const std::string log = logged(options(3), [](Rank& r) {
    if (r.rank == kLate) come_late();
    const int ranks[] = {0, 1, 2};
    const auto group = make_named_group(*r.world, "named", ranks, {});
    group->barrier();
  });
  if (is_child()) return;
  EXPECT_TRUE(contains(log, "[named] making the group: ranks 0, 2 of the world have waited ")) << log;
  EXPECT_TRUE(contains(log, " s for rank 1 (pid ")) << log;
  EXPECT_TRUE(contains(log, "(it has destroyed this group, or has not made it yet)")) << log;
}

TEST_P(WaitReport, ACollectiveNamesPresentAndMissingRanks) {
  const std::string log = logged(options(4), [](Rank& r) {
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    if (r.rank == kLate) come_late();
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, 16);
  });
  if (is_child()) return;
  EXPECT_TRUE(contains(log, "maniple: warning: [world] all_reduce #3 int32[1] sum at ")) << log;
  EXPECT_TRUE(contains(log, "ranks 0, 2, 3 have waited ") || contains(log, "ranks 0, 2-3 have waited ")) << log;
  EXPECT_TRUE(contains(log, " s for rank 1 (pid ")) << log;
  EXPECT_TRUE(contains(log, "it last called all_reduce #2 int32[1] sum at ")) << log;
  // After 0.5, 1 and 2 s, by one rank; one more where the machine is slow.
  EXPECT_GE(count_of(log, "have waited"), 2) << log;
  EXPECT_LE(count_of(log, "have waited"), 4) << log;
}

TEST_P(WaitReport, ASubGroupHasItsOwn) {
  const std::string log = logged(options(3), [](Rank& r) {
    const auto group = r.world->split(r.rank == 0 ? -1 : 0);
    if (r.rank == 1) come_late();
    if (group) group->barrier();
    r.world->barrier();
  });
  if (is_child()) return;
  EXPECT_TRUE(contains(log, "[world/1.0] barrier #2")) << log;
  EXPECT_TRUE(contains(log, "rank 2 of the world has waited ")) << log;
  EXPECT_TRUE(contains(log, "[world] barrier #3")) << log;
}

TEST_P(WaitReport, AReceiveNamesItsSender) {
  const std::string log = logged(options(2), [](Rank& r) {
    int value = 7;
    r.world->barrier();
    if (r.rank == kLate) {
      come_late();
      r.world->send(buffer_of(value), 0, 4);  // first, so that no rank has to wait for it
      r.world->send(buffer_of(value), 0, 3);
    } else {
      int unhurried = 0;
      const Work nobody_waits = r.world->irecv(buffer_of(unhurried), kLate, 4);
      r.world->recv(buffer_of(value), kLate, 3);
      nobody_waits.wait();
    }
  });
  if (is_child()) return;
  EXPECT_TRUE(contains(log, "maniple: warning: [recv from rank 1 tag 3 world rank 0/2] has waited ")) << log;
  EXPECT_TRUE(contains(log, " s for rank 1 (pid ")) << log;
  EXPECT_FALSE(contains(log, "tag 4")) << log;
  EXPECT_LE(count_of(log, "has waited"), 4) << log;
}

TEST_P(WaitReport, ReportsCanBeDisabled) {
  RunOptions run = options(2);
  run.env = {{"MANIPLE_WAIT_REPORT", "0"}};
  const std::string log = logged(run, [](Rank& r) {
    if (r.rank == kLate) come_late();
    r.world->barrier();
  });
  EXPECT_FALSE(contains(log, "waited")) << log;
}

// The rank that would say it is not needed for it.
TEST_P(WaitReport, AfterRankZeroHasLeft) {
  const std::string log = logged(options(4), [](Rank& r) {
    const auto group = r.world->split(r.rank == 0 ? -1 : 0);
    if (r.rank == 0) r.world.reset();
    r.phase("rank 0 has left");
    if (r.rank == 3) come_late();
    if (group) group->barrier();
    r.phase("all have come");
  });
  if (is_child()) return;
  EXPECT_TRUE(contains(log, "ranks 1, 2 of the world have waited ")) << log;
  EXPECT_TRUE(contains(log, " s for rank 3 (pid ")) << log;
}

}  // namespace
}  // namespace maniple::harness
