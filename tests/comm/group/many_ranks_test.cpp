// Much of everything: a thousand ranks that meet and pass a barrier; hundreds of them, or a thousand, without shared
// memory; large results.
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include <gtest/gtest.h>
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

// Large enough for copies past the caches, where there are such.
TEST(LargeResults, AllOfItArrives) {
  run_ranks({.n = 4, .as = As::processes}, [](Rank& r) {
    constexpr std::size_t kPart = 5 * (std::size_t{1} << 18) + 3;  // 5 MiB
    const std::size_t all = kPart * 4;
    const auto value = [](std::size_t i, int of) {
      return static_cast<std::int32_t>(i * 3 + static_cast<std::size_t>(of) * 1000003);
    };
    RegisteredMemory one = r.world->allocate(all * sizeof(std::int32_t));
    RegisteredMemory other = r.world->allocate(all * sizeof(std::int32_t));
    std::vector<std::int32_t> ordinary_in(all), ordinary_out(all);
    for (const bool registered : {false, true}) {
      auto* const in = registered ? static_cast<std::int32_t*>(one.data()) : ordinary_in.data();
      auto* const out = registered ? static_cast<std::int32_t*>(other.data()) : ordinary_out.data();
      const auto buffer = [](std::int32_t* data, std::size_t count) { return Buffer{data, count, DType::int32}; };
      // Element i of the result, of rank `of`'s input from `first` on.
      const auto expect = [&](const char* name, std::size_t i, std::size_t count, int of, std::size_t first) {
        for (std::size_t k = 0; k < count; ++k) {
          ASSERT_EQ(out[i + k], value(first + k, of))
              << name << (registered ? ", registered, " : ", ordinary, ") << i + k;
        }
      };
      for (std::size_t i = 0; i < all; ++i) in[i] = value(i, r.rank);
      const auto me = static_cast<std::size_t>(r.rank);
      r.world->all_gather(buffer(in, kPart), buffer(out, all));
      for (int of = 0; of < 4; ++of) expect("all_gather", kPart * static_cast<std::size_t>(of), kPart, of, 0);
      r.world->all_to_all(buffer(in, all), buffer(out, all));
      for (int of = 0; of < 4; ++of) expect("all_to_all", kPart * static_cast<std::size_t>(of), kPart, of, kPart * me);
      r.world->gather(buffer(in, kPart), buffer(out, r.rank == 2 ? all : 0), 2);
      for (int of = 0; of < 4 && r.rank == 2; ++of)
        expect("gather", kPart * static_cast<std::size_t>(of), kPart, of, 0);
      // From ordinary memory of some into registered memory, and the reverse; the root's own part is in its place.
      auto* const given = r.rank == 2 ? out + kPart * 2 : r.rank == 0 ? in : ordinary_in.data();
      std::fill_n(out, all, -1);
      for (std::size_t i = 0; i < kPart; ++i) given[i] = value(i, r.rank);
      r.world->gather(buffer(given, kPart), buffer(out, r.rank == 2 ? all : 0), 2);
      for (int of = 0; of < 4 && r.rank == 2; ++of)
        expect("gather in place", kPart * static_cast<std::size_t>(of), kPart, of, 0);
      r.world->scatter(buffer(in, r.rank == 1 ? all : 0), buffer(out, kPart), 1);
      expect("scatter", 0, kPart, 1, kPart * me);
      std::copy_n(in, all, out);
      r.world->broadcast(buffer(out, all), 3);
      expect("broadcast", 0, all, 3, 0);
      r.world->all_reduce(ConstBuffer{in, all, DType::int32}, buffer(out, all), ReduceOp::max);
      expect("all_reduce", 0, all, 3, 0);
    }
  });
}

TEST(ManyRanks, AThousandThreadsJoinAndPassABarrier) {
  const RunResult result = run_ranks({.n = 1000, .as = As::threads, .init = false, .limit = Seconds(120)}, [](Rank& r) {
    r.phase("all threads have started");
    const double start = now_s();
    r.init();
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

// With 520 ranks a slot of a 16 KiB stage would have less than 8 bytes for each: the stage is made larger.
TEST(ManyRanks, EveryCellOfASmallStageHoldsAnElement) {
  run_ranks({.n = 520,
             .as = As::threads,
             .timeout = Seconds(100),
             .limit = Seconds(200),
             .env = {{"MANIPLE_STAGE_KIB", "16"}}},
            [](Rank& r) {
              const auto n = static_cast<std::size_t>(r.size);
              constexpr std::size_t kEach = 2;
              const auto value = [](std::size_t i, int of) {
                return static_cast<std::int64_t>(i) * 1'000'003 + std::int64_t{of} * 7;
              };
              std::vector<std::int64_t> in(n * kEach), out(n * kEach), own(kEach);
              for (std::size_t i = 0; i < in.size(); ++i) in[i] = value(i, r.rank);
              const auto first = static_cast<std::size_t>(r.rank) * kEach;
              r.world->reduce_scatter(buffer_of(in), buffer_of(own));
              for (std::size_t i = 0; i < kEach; ++i) {
                EXPECT_EQ(own[i], value(first + i, 0) * r.size + 7 * std::int64_t{r.size} * (r.size - 1) / 2);
              }
              r.world->all_to_all(buffer_of(in), buffer_of(out));
              for (std::size_t i = 0; i < out.size(); ++i) {
                EXPECT_EQ(out[i], value(first + i % kEach, static_cast<int>(i / kEach)));
              }
              r.world->scatter(buffer_of(in), buffer_of(own), 519);
              for (std::size_t i = 0; i < kEach; ++i) EXPECT_EQ(own[i], value(first + i, 519));
            });
}

// Ranks that run on one core part if they may use others (Arena::leave_core_of), and stay free to use all of them.
TEST(ManyRanks, RanksThatMeetOnACoreKeepTheirAffinity) {
  run_ranks({.n = 2, .as = As::processes, .transport = TransportKind::shm}, [](Rank& r) {
    cpu_set_t all, one;
    ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    std::vector<float> values(2 << 20, 1.0F);
    for (int turn = 0; turn < 10; ++turn) {
      ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
      ASSERT_EQ(::sched_setaffinity(0, sizeof all, &all), 0);
      r.world->all_reduce(buffer_of(values), ReduceOp::max);
      cpu_set_t now;
      ASSERT_EQ(::sched_getaffinity(0, sizeof now, &now), 0);
      EXPECT_TRUE(CPU_EQUAL(&now, &all));
    }
    EXPECT_EQ(values.back(), 1.0F);
  });
}

void reduce_over_tcp(int n) {
  const RunResult result = run_ranks({.n = n,
                                      .as = As::processes,
                                      .transport = TransportKind::tcp,
                                      .init = false,
                                      .timeout = Seconds(200),
                                      .limit = Seconds(400)},
                                     [](Rank& r) {
                                       r.phase("all have started");
                                       const double start = now_s();
                                       r.init();
                                       r.report("joined", now_s() - start);
                                       for (int round = 0; round < 3; ++round) {
                                         std::vector<std::int64_t> ranks(100, r.rank);
                                         r.world->all_reduce(buffer_of(ranks));
                                         EXPECT_EQ(ranks.back(), std::int64_t{r.size} * (r.size - 1) / 2);
                                       }
                                       r.report("reduced", now_s() - start);
                                     });
  if (!result) return;
  double joined = 0, reduced = 0;
  for (const auto& [rank, seconds] : result.numbers("joined")) joined = std::max(joined, seconds);
  for (const auto& [rank, seconds] : result.numbers("reduced")) reduced = std::max(reduced, seconds);
  std::printf("%d ranks over TCP: joined in %.3f s, three all_reduces done after %.3f s\n", n, joined, reduced);
  EXPECT_EQ(result.numbers("reduced").size(), static_cast<std::size_t>(n));
}

TEST(ManyRanks, HundredsOfProcessesReduceOverTcp) { reduce_over_tcp(256); }

TEST(ManyRanksLong, AThousandProcessesReduceOverTcp) { reduce_over_tcp(1000); }

}  // namespace
}  // namespace maniple::harness
