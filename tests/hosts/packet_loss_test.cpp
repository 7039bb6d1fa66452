// A bad network: packets are lost at random, and every rank is alive. No rank may count as lost, and results are exact.
#include <netinet/in.h>
#include <sys/socket.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "comm/base/unique_fd.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

/// The worst loss, in each direction, that must not matter: half of all round trips, or a third before Linux 6.15,
/// which cannot be told to retransmit more often.
double worst_loss() {
  constexpr int kTcpRtoMinUs = 45;
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  int us = 0;
  socklen_t length = sizeof us;
  return ::getsockopt(fd.get(), IPPROTO_TCP, kTcpRtoMinUs, &us, &length) == 0 ? 0.3 : 0.2;
}

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

INSTANTIATE_TEST_SUITE_P(Network, PacketLoss, testing::Values(0.1, worst_loss()),
                         [](const auto& loss) { return loss.param == 0.1 ? "light" : "heavy"; });

// Only heartbeats travel here: the ranks are idle for longer than a rank may be silent.
TEST(IdlePacketLoss, LosesNoRank) {
  constexpr double kIdle = 5;
  const RunResult result = run_ranks(
      {.n = 2, .as = As::netns, .hosts = 2, .lossy = true, .fault = delay_at(0, 1, Seconds(kIdle))}, [&](Rank& r) {
        int value = 1;
        r.world->all_reduce(buffer_of(value));
        r.phase("connected");
        if (r.rank == 0) r.lose_packets(worst_loss(), Seconds(kIdle));
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
