// How ranks end: soon after they met, at different times. They end in good order, and mpirun is content with them.
#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

RunOptions options(int ranks) {
  RunOptions run;
  run.n = ranks;
  run.as = As::processes;
  run.timeout = Seconds(30);
  run.limit = Seconds(40);
  return run;
}

// Connections that the engine has begun to open are not open yet when the ranks end; with more ranks than cores some of them end
// before others have looked at theirs. (MPICH's MPI_Finalize took that badly.)
TEST(EngineEnd, SoonAfterRanksHaveMet) {
  for (int run = 0; run < 6; ++run) {
    run_ranks(options(5), [](Rank& r) {
      for (int root = 0; root < r.size; ++root) r.world->broadcast_object(std::string(20'000, 'x'), root);
    });
  }
}

TEST(EngineEnd, AtDifferentTimes) {
  for (int last = 0; last < 3; ++last) {
    run_ranks(options(3), [last](Rank& r) {
      r.world->barrier();
      if (r.rank == last) {
        // The others have told all there is to tell, and have nothing left to do but to wait inside the engine.
        std::vector<float> sum(300'001, 1.0f);
        const auto alone = r.world->split(r.rank, 0);
        alone->all_reduce(buffer_of(sum));
        EXPECT_EQ(sum[300'000], 1.0f);
      } else {
        r.world->split(r.rank, 0);
      }
    });
  }
}

}  // namespace
}  // namespace maniple::harness
