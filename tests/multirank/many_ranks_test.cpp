// A thousand ranks meet and pass a barrier.
#include <cstdio>

#include "harness/run_ranks.h"
#include <gtest/gtest.h>

namespace maniple::harness {
namespace {

TEST(ManyRanks, AThousandThreadsJoinAndPassABarrier) {
  const RunResult result = run_ranks({.n = 1000, .as = As::threads, .join = false, .limit = Seconds(120)}, [](Rank& r) {
    r.phase("all threads have started");
    const double start = now_s();
    r.join();
    const double joined = now_s();
    r.world->barrier();
    r.report("joined", joined - start);
    r.report("passed", now_s() - start);
  });
  double joined = 0, passed = 0;
  for (const auto& [rank, seconds] : result.numbers("joined")) joined = std::max(joined, seconds);
  for (const auto& [rank, seconds] : result.numbers("passed")) passed = std::max(passed, seconds);
  std::printf("1000 ranks: joined in %.3f s, through the barrier after %.3f s\n", joined, passed);
  EXPECT_EQ(result.numbers("passed").size(), 1000u);
}

}  // namespace
}  // namespace maniple::harness
