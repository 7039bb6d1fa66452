// Messages between many ranks of one host: from 65 on the rings between them are small.
#include <cstdlib>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

// Bytes that differ from one pair of ranks, and one message between them, to the next.
std::vector<std::uint8_t> content(std::size_t bytes, int from, int to, int number) {
  std::vector<std::uint8_t> result(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    result[i] = static_cast<std::uint8_t>(i * 7 + static_cast<std::size_t>(from * 31 + to * 17 + number * 5));
  }
  return result;
}

// Each rank sends to the ranks after it, whose rings lie side by side: messages that fit a slot, one that does not, and
// some that are larger than a ring. From the second round on, the small ones go through slots.
void exchange(Rank& r) {
  constexpr int kNeighbours = 3;
  constexpr int kSmall = 6;
  const std::vector<std::size_t> large = {1000, 4000, 5000, 20'000};
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(fmt::format("rank {}, round {}", r.rank, round));
    std::vector<std::vector<std::uint8_t>> sent;
    std::vector<Work> works;
    for (int i = 1; i <= kNeighbours; ++i) {
      const int to = (r.rank + i) % r.size;
      for (int k = 0; k < kSmall; ++k) {
        const auto small = content(static_cast<std::size_t>(k) * 87, r.rank, to, k);
        r.world->send(buffer_of(small), to, k);
      }
    }
    sent.reserve(kNeighbours * large.size());
    for (int i = 1; i <= kNeighbours; ++i) {
      const int to = (r.rank + i) % r.size;
      for (const std::size_t bytes : large) {
        sent.push_back(content(bytes, r.rank, to, round));
        works.push_back(r.world->isend(buffer_of(sent.back()), to, 100));
      }
    }
    for (int i = kNeighbours; i >= 1; --i) {
      const int from = (r.rank + r.size - i) % r.size;
      const auto expect = [&](std::size_t bytes, int tag, int number) {
        std::vector<std::uint8_t> got(bytes);
        r.world->recv(buffer_of(got), from, tag);
        EXPECT_TRUE(got == content(bytes, from, r.rank, number)) << bytes << " bytes from rank " << from;
      };
      for (int k = 0; k < kSmall; ++k) expect(static_cast<std::size_t>(k) * 87, k, k);
      for (const std::size_t bytes : large) expect(bytes, 100, round);
    }
    for (const Work& work : works) work.synchronize();
  }
  std::int64_t sum = r.rank;
  r.world->all_reduce(buffer_of(sum));
  EXPECT_EQ(sum, std::int64_t{r.size} * (r.size - 1) / 2);
}

RunOptions many(int n, As as) {
  return {.n = n, .as = as, .transport = TransportKind::automatic, .timeout = Seconds(100), .limit = Seconds(200)};
}

class ManyMessages : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ManyMessages, testing::Values(64, 65, 66, 67, 128, 256),
                         [](const auto& test) { return "n" + std::to_string(test.param); });

TEST_P(ManyMessages, ArriveUnchanged) { run_ranks(many(GetParam(), As::threads), exchange); }

TEST(ManyMessagesOfProcesses, ArriveUnchanged) { run_ranks(many(66, As::processes), exchange); }

TEST(ManyMessagesOfProcesses, ArriveUnchangedOnTwoPretendedHosts) {
  RunOptions options = many(67, As::processes);
  options.init = false;
  run_ranks(options, [](Rank& r) {
    ::setenv("MANIPLE_HOST", r.rank == 66 ? "second" : "first", 1);
    r.init();
    EXPECT_EQ(r.world->topology().node_count(), 2);
    exchange(r);
    // Frames between ranks of one host go through the rings of collectives here.
    std::vector<std::int32_t> values(50'000, 1);
    r.world->all_reduce(buffer_of(values));
    EXPECT_EQ(values, std::vector<std::int32_t>(50'000, 67));
  });
}

}  // namespace
}  // namespace maniple::harness
