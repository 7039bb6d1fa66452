// Fault 5: a rank throws or exits early. The others do not wait for it.
#include "fault/expect_error.h"
#include "fault/ways.h"

namespace maniple::harness {
namespace {

void expect_quick_error(Rank& r, int victim) {
  const Caught caught = catch_error([&] {
    for (;;) {
      r.step();
      int value = 1;
      r.world->all_reduce(buffer_of(value));
    }
  });
  r.report("noticed_at", now_s());
  EXPECT_TRUE(caught.is_one_of({ErrorKind::peer_lost, ErrorKind::aborted})) << caught;
  EXPECT_TRUE(names_rank(caught.text, victim)) << caught;
  EXPECT_LT(caught.took, 10.0);
}

class Throw : public EveryTransport {};
INSTANTIATE_TEST_SUITE_P(Faults, Throw, process_transports(), transport_name);

TEST_P(Throw, OfOneProcess) {
  run_ranks({.n = 4, .as = As::processes, .transport = GetParam(), .fault = throw_at(1, 10)},
            [](Rank& r) { expect_quick_error(r, 1); });
}

TEST_P(Throw, ExitOfOneProcess) {
  const auto result = run_ranks({.n = 4, .as = As::processes, .transport = GetParam(), .fault = exit_at(0, 10)},
                                [](Rank& r) { expect_quick_error(r, 0); });
  if (result) {
    EXPECT_EQ(result.ended[0].exit_code, 7);
    EXPECT_EQ(result.numbers("noticed_at").size(), 3u);
  }
}

TEST_P(Throw, RankThatIsDoneMayLeaveWhileOthersStillWorkWithoutIt) {
  run_ranks({.n = 3, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    const auto group = r.world->split(r.rank == 0 ? -1 : 0);
    if (r.rank == 0) return;  // without a word
    for (int i = 0; i < 100; ++i) {
      value = 1;
      group->all_reduce(buffer_of(value));
      EXPECT_EQ(value, 2);
    }
  });
}

TEST(ThrowOfAThread, EndsTheOthersCalls) {
  for (const TransportKind transport : {TransportKind::loopback, TransportKind::tcp}) {
    run_ranks({.n = 4, .as = As::threads, .transport = transport, .fault = throw_at(2, 10)},
              [](Rank& r) { expect_quick_error(r, 2); });
  }
}

}  // namespace
}  // namespace maniple::harness
