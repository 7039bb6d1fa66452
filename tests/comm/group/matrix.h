// Where operations are tested: every transport, as threads or processes, for every world size.
//
// Each program of tests is run several times: ranks as threads (also under the sanitizers), ranks as processes, and
// processes on several hosts. MANIPLE_TEST_AS says which. MANIPLE_TEST_BACKEND runs them with another backend, for
// fewer sizes.
#pragma once

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "comm/group/arena.h"
#include "harness/run_ranks.h"
#include "harness/sanitizers.h"

namespace maniple::harness {

struct Place {
  As as = As::threads;
  TransportKind transport = TransportKind::automatic;
  int n = 2;
  int hosts = 1;
};

/// MANIPLE_TEST_AS: threads (if unset), processes or netns.
inline As chosen_as() {
  const char* name = std::getenv("MANIPLE_TEST_AS");
  const std::string_view as = name != nullptr ? name : "threads";
  return as == "netns" ? As::netns : as == "processes" ? As::processes : As::threads;
}

inline bool with_plugin() { return chosen_backend() != "native"; }

inline std::vector<Place> places(std::vector<int> sizes) {
  const As as = chosen_as();
  if (!test_device().is_cpu()) {
    // All ranks on one GPU, which NCCL is not made for.
    std::vector<Place> on_gpu;
    for (const int n : sizes) {
      if (n <= 2 || (chosen_backend() != "nccl" && (n == 4 || n == 8)))
        on_gpu.push_back({as, TransportKind::automatic, n, 1});
    }
    return on_gpu;
  }
  if (with_plugin()) {
    // The algorithms that are supplied are tested with the native backend; here it is that each call takes the right
    // way.
    if (as == As::netns) return {{as, TransportKind::automatic, 3, 2}};
    std::vector<Place> few;
    for (const int n : sizes) {
      if (n == 2 || n == 5 || (n == 1 && chosen_backend() != "mpi"))
        few.push_back({as, TransportKind::automatic, n, 1});
    }
    return few;
  }
  if (as == As::netns) {
    // Few, as a network has to be made for each: one rank a host, hosts of unequal size, and more hosts than two.
    if (sizes.size() < 3) return {{as, TransportKind::automatic, 4, 2}};
    return {{as, TransportKind::automatic, 2, 2},
            {as, TransportKind::automatic, 5, 2},
            {as, TransportKind::automatic, 7, 3},
            {as, TransportKind::automatic, 8, 4}};
  }
  std::vector<Place> all;
  for (const auto transport : {as == As::threads ? TransportKind::loopback : TransportKind::shm, TransportKind::tcp}) {
    for (const int n : sizes) all.push_back({as, transport, n, 1});
  }
  return all;
}

inline std::vector<Place> every_place() { return places({1, 2, 3, 4, 5, 6, 7, 8, 9, 16}); }

inline std::string name_of(const testing::TestParamInfo<Place>& place) {
  const Place& p = place.param;
  const std::string hosts = p.hosts > 1 ? fmt::format("_on_{}_hosts", p.hosts) : "";
  return fmt::format("{}_{}_n{}{}", to_string(p.transport), to_string(p.as), p.n, hosts);
}

/// Runs the body at the place; generous limits, as machines may have fewer cores than ranks.
inline RunResult run_at(const Place& place, const std::function<void(Rank&)>& body) {
  return run_ranks({.n = place.n,
                    .as = place.as,
                    .transport = place.transport,
                    .timeout = Seconds(60),
                    .limit = Seconds(120),
                    .hosts = place.hosts},
                   body);
}

class Operations : public testing::TestWithParam<Place> {
 protected:
  RunResult run(const std::function<void(Rank&)>& body) { return run_at(GetParam(), body); }
};

/// Elements: none, one, fewer than ranks, odd, round, not divisible, larger than a cache-sized chunk.
inline std::vector<std::size_t> counts() {
  if (kSanitized) return {0, 1, 3, 17, 1000};
  if (with_plugin()) return {0, 1, 17, 4099};
  return {0, 1, 3, 17, 1000, 4099, 100003};
}
inline std::size_t largest_count() { return counts().back(); }

/// One way to make a call: walks through all combinations as tests go on, so that each pair of choices occurs.
struct Manner {
  Memory memory = Memory::ordinary;
  bool in_place = false;
  bool async = false;
  CallOptions call() const { return {.async_op = async}; }

  static Manner of(int number) {
    return {kAllMemory[number % kAllMemory.size()], (number / 5 + number) % 2 == 1,
            (number / 10 + number / 3) % 2 == 1};
  }
  static constexpr int kAll = 20;
  /// The combination with this number, each exactly once in 0 .. kAll-1.
  static Manner exactly(int number) { return {kAllMemory[number % 5], (number / 5) % 2 == 1, (number / 10) % 2 == 1}; }

  std::string describe() const {
    return fmt::format("{}{}{}", to_string(memory), in_place ? " in-place" : "", async ? " async" : "");
  }
};

}  // namespace maniple::harness
