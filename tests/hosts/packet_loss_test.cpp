// A bad network: packets are lost at random, and every rank is alive. No rank may count as lost, and results are exact.
#include <gtest/gtest.h>

#include <algorithm>

#include <fmt/format.h>

#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

class PacketLoss : public testing::TestWithParam<double> {};

TEST_P(PacketLoss, LosesNoRankAtTheDefaultHeartbeat) {
  constexpr double kLossy = 4;  // seconds, longer than a rank may be silent
  const RunResult result =
      run_ranks({.n = 2, .as = As::netns, .timeout = Seconds(60), .hosts = 2, .lossy = true}, [&](Rank& r) {
        std::vector<std::int32_t> values(20'000);
        const auto reduce = [&](std::int32_t round) {
          std::fill(values.begin(), values.end(), round + r.rank);
          r.world->all_reduce(buffer_of(values));
          EXPECT_EQ(std::count(values.begin(), values.end(), 2 * round + 1), static_cast<long>(values.size()));
        };
        reduce(0);
        r.phase("connected");
        if (r.rank == 0) r.lose_packets(GetParam(), Seconds(kLossy));
        r.phase("lossy");
        const double end = now_s() + kLossy;
        std::int32_t again = 1;
        int rounds = 0;
        for (; again != 0; ++rounds) {
          reduce(rounds);
          again = now_s() < end ? 1 : 0;
          r.world->broadcast(buffer_of(again), 0);
        }
        r.report("rounds", rounds);
      });
  if (!result) return;
  EXPECT_GT(result.packets_lost, 5U);
  EXPECT_EQ(result.numbers("rounds").at(0), result.numbers("rounds").at(1));
}

INSTANTIATE_TEST_SUITE_P(Network, PacketLoss, testing::Values(0.1, 0.3),
                         [](const auto& loss) { return fmt::format("of_{:.0f}_percent", loss.param * 100); });

// Only heartbeats travel here: the ranks are idle for longer than a rank may be silent.
TEST(IdlePacketLoss, LosesNoRank) {
  constexpr double kIdle = 5;
  const RunResult result = run_ranks(
      {.n = 2, .as = As::netns, .hosts = 2, .lossy = true, .fault = delay_at(0, 1, Seconds(kIdle))}, [&](Rank& r) {
        int value = 1;
        r.world->all_reduce(buffer_of(value));
        r.phase("connected");
        if (r.rank == 0) r.lose_packets(0.3, Seconds(kIdle));
        r.phase("lossy");
        r.step();
        r.phase("idle for long enough");
        r.world->all_reduce(buffer_of(value));
        EXPECT_EQ(value, 4);
      });
  if (!result) return;
  EXPECT_GT(result.packets_lost, 5U);
}

}  // namespace
}  // namespace maniple::harness
