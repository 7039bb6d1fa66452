// The same inputs give the same bits: on every rank, in every run, whatever the memory and however late a rank is.
#include <cmath>
#include <random>

#include <fmt/format.h>

#include "comm/group/matrix.h"

namespace maniple::harness {
namespace {

class Determinism : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, Determinism, testing::ValuesIn(every_place()), name_of);

// Values of very different size, so that another order of additions gives other bits.
template <class T>
std::vector<T> random_values(int rank, std::size_t count) {
  std::mt19937 random(1234 + rank);
  std::vector<T> values;
  values.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const float mantissa = static_cast<float>(random() % 20001) / 10000.0f - 1.0f;
    values.push_back(T(std::ldexp(mantissa, static_cast<int>(random() % 12) - 6)));
  }
  return values;
}

std::uint64_t hash_of(const void* data, std::size_t bytes, std::uint64_t hash = 0xcbf29ce484222325ULL) {
  const auto* byte = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ byte[i]) * 0x100000001b3ULL;
  return hash;
}

template <class T>
std::uint64_t hash_of_sums(Rank& r, Arena& arena, Memory memory) {
  std::uint64_t hash = 0;
  for (const std::size_t count :
       {std::size_t{1}, std::size_t{37}, std::size_t{1000}, std::min<std::size_t>(largest_count(), 50021)}) {
    const auto values = random_values<T>(r.rank, count);
    const Buffer buffer = arena.take(0, memory, dtype_of<T>(), count);
    std::memcpy(buffer.data, values.data(), buffer.bytes());
    r.world->all_reduce(buffer);
    hash = hash_of(buffer.data, buffer.bytes(), hash);
  }
  return hash;
}

TEST_P(Determinism, SameBitsOnAllRanksAndFromRunToRun) {
  std::map<std::string, std::string> first_run;
  for (int repetition = 0; repetition < 2; ++repetition) {
    const RunResult result = run([](Rank& r) {
      Arena arena(r, largest_count() * 8);
      for (const Memory memory : kAllMemory) {
        for (int again = 0; again < 2; ++again) {
          const std::string hashes = fmt::format(
              "{:x} {:x} {:x} {:x}", hash_of_sums<float>(r, arena, memory), hash_of_sums<double>(r, arena, memory),
              hash_of_sums<float16>(r, arena, memory), hash_of_sums<bfloat16>(r, arena, memory));
          r.report(fmt::format("{}/{}", to_string(memory), again), hashes);
        }
      }
    });
    if (!result) continue;
    for (const auto& [key, by_rank] : result.reports) {
      for (const auto& [rank, hashes] : by_rank)
        EXPECT_EQ(hashes, by_rank.at(0)) << key << ": rank " << rank << " differs from rank 0";
      const auto [seen, is_new] = first_run.emplace(key, by_rank.at(0));
      if (!is_new) {
        EXPECT_EQ(by_rank.at(0), seen->second) << key << ": differs from run to run";
      }
    }
    for (const Memory memory : kAllMemory) {
      const std::string name = to_string(memory);
      EXPECT_EQ(result.texts(name + "/0"), result.texts(name + "/1")) << name << ": differs from call to call";
    }
  }
}

TEST_P(Determinism, OrderOfArrivalDoesNotMatter) {
  run([](Rank& r) {
    std::uint64_t first = 0;
    for (int late = 0; late < r.size; ++late) {
      auto values = random_values<float>(r.rank, 3000);
      // Everyone but `late` is inside the operation before `late` starts it.
      const Work work =
          r.rank == late ? Work() : r.world->all_reduce(buffer_of(values), ReduceOp::sum, {.async_op = true});
      r.phase("all but one are there");
      r.rank == late ? r.world->all_reduce(buffer_of(values)).wait() : work.wait();
      const std::uint64_t hash = hash_of(values.data(), values.size() * sizeof(float));
      if (late == 0) first = hash;
      EXPECT_EQ(hash, first) << "with rank " << late << " late";
    }
  });
}

TEST_P(Determinism, SixteenBitSumsAreRoundedOnce) {
  run([](Rank& r) {
    // 256 + 1 is not representable in bfloat16; one rounding at the end gives the even neighbour of the exact sum.
    std::vector<bfloat16> values(100, bfloat16(r.rank == 0 ? 256.0f : 1.0f));
    r.world->all_reduce(buffer_of(values));
    const float expected = static_cast<float>(bfloat16(256.0f + static_cast<float>(r.size - 1)));
    for (const bfloat16 value : values) ASSERT_EQ(static_cast<float>(value), expected);
  });
}

}  // namespace
}  // namespace maniple::harness
