#include "base/host.h"

#include <sched.h>
#include <gtest/gtest.h>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

TEST(CoreSet, KnowsThisProcess) {
  cpu_set_t set;
  CPU_ZERO(&set);
  ASSERT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  const CoreSet cores = CoreSet::of_this_process();
  EXPECT_EQ(cores.count(), CPU_COUNT(&set));
  for (const int core : cores.list()) EXPECT_TRUE(CPU_ISSET(static_cast<std::size_t>(core), &set)) << core;
}

TEST(CoreSet, BoundRanksTogetherHaveAllTheirCores) {
  CoreSet host = CoreSet::of({3});
  host.add(CoreSet::of({200}));
  host.add(CoreSet::of({3, 64}));
  host.add(CoreSet{});
  EXPECT_EQ(host.count(), 3);
  EXPECT_EQ(host.list(), (std::vector<int>{3, 64, 200}));
}

TEST(CoreSet, ComesBackAsItWas) {
  for (const auto& list : {std::vector<int>{}, {0}, {63}, {64}, {1, 8191}}) {
    const CoreSet set = CoreSet::of(list);
    EXPECT_EQ(CoreSet::decode(set.encode()), set);
    EXPECT_EQ(set.list(), list);
  }
}

TEST(CoreSet, RefusesWhatItCannotHaveWritten) {
  EXPECT_THROW(CoreSet::decode("1234567"), ProtocolError);
  EXPECT_THROW(CoreSet::decode(std::string(8, '\0')), ProtocolError);
  EXPECT_THROW(CoreSet::decode(std::string(1032, 'x')), ProtocolError);
}

}  // namespace
}  // namespace maniple
