// Where operations are tested: every transport, as threads or processes, for every world size.
//
// Each file of tests is compiled into two programs: ranks as threads (these also run under the sanitizers) and ranks as
// processes.
#pragma once

#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "harness/run_ranks.h"
#include "harness/sanitizers.h"
#include "multirank/arena.h"

namespace maniple::harness {

struct Place {
  As as = As::threads;
  TransportKind transport = TransportKind::automatic;
  int n = 2;
};

inline std::vector<Place> places(std::vector<int> sizes) {
#if defined(MANIPLE_TEST_THREADS)
  const std::vector<std::pair<As, TransportKind>> ways = {{As::threads, TransportKind::loopback},
                                                          {As::threads, TransportKind::tcp}};
#else
  const std::vector<std::pair<As, TransportKind>> ways = {{As::processes, TransportKind::shm},
                                                          {As::processes, TransportKind::tcp}};
#endif
  std::vector<Place> all;
  for (const auto& [as, transport] : ways) {
    for (const int n : sizes) all.push_back({as, transport, n});
  }
  return all;
}

inline std::vector<Place> every_place() { return places({1, 2, 3, 4, 5, 6, 7, 8, 9, 16}); }

inline std::string name_of(const testing::TestParamInfo<Place>& place) {
  return fmt::format("{}_{}_n{}", to_string(place.param.transport), to_string(place.param.as), place.param.n);
}

/// Runs the body at the place; generous limits, as machines may have fewer cores than ranks.
inline RunResult run_at(const Place& place, const std::function<void(Rank&)>& body) {
  return run_ranks({.n = place.n, .as = place.as, .transport = place.transport, .timeout = Seconds(60), .limit = Seconds(120)},
                   body);
}

class Operations : public testing::TestWithParam<Place> {
 protected:
  RunResult run(const std::function<void(Rank&)>& body) { return run_at(GetParam(), body); }
};

/// Elements: none, one, fewer than ranks, odd, round, not divisible, larger than a cache-sized chunk.
inline std::vector<std::size_t> counts() {
  if (kSanitized) return {0, 1, 3, 17, 1000};
  return {0, 1, 3, 17, 1000, 4099, 100003};
}
inline std::size_t largest_count() { return counts().back(); }

/// One way to make a call: walks through all combinations as tests go on, so that each pair of choices occurs.
struct Manner {
  Memory memory = Memory::ordinary;
  bool in_place = false;
  bool async = false;

  static Manner of(int number) {
    return {kAllMemory[number % kAllMemory.size()], (number / 5 + number) % 2 == 1, (number / 10 + number / 3) % 2 == 1};
  }
  static constexpr int kAll = 20;
  /// The combination with this number, each exactly once in 0 .. kAll-1.
  static Manner exactly(int number) { return {kAllMemory[number % 5], (number / 5) % 2 == 1, (number / 10) % 2 == 1}; }

  std::string describe() const {
    return fmt::format("{}{}{}", to_string(memory), in_place ? " in-place" : "", async ? " async" : "");
  }
};

}  // namespace maniple::harness
