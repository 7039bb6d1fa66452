#include "comm/base/host.h"

#include <sched.h>
#include <sys/stat.h>

#include <fstream>

#include <gtest/gtest.h>

#include "harness/temporary_directory.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

TEST(CoreSet, ReturnsTheCoresOfThisProcess) {
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

TEST(CoreSet, HardwareThreadsOfOneCoreAreOnePhysicalCore) {
  const harness::TemporaryDirectory cpus;
  const auto describe = [&](int core, const std::string& siblings) {
    const std::string folder = cpus.path() + "/cpu" + std::to_string(core);
    ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
    ASSERT_EQ(::mkdir((folder + "/topology").c_str(), 0700), 0);
    std::ofstream(folder + "/topology/thread_siblings_list") << siblings << '\n';
  };
  for (int core = 0; core < 2; ++core) {
    describe(core, std::to_string(core) + "," + std::to_string(core + 2));
    describe(core + 2, std::to_string(core) + "," + std::to_string(core + 2));
  }
  describe(4, "4-5");
  describe(5, "4-5");
  describe(6, "nonsense");
  EXPECT_EQ(CoreSet::of({0, 1, 2, 3}).physical(cpus.path()).list(), (std::vector<int>{0, 1}));
  EXPECT_EQ(CoreSet::of({3, 5, 6, 7}).physical(cpus.path()).list(),
            (std::vector<int>{1, 4, 6, 7}));  // 7: not mentioned
  EXPECT_TRUE(CoreSet().physical(cpus.path()).empty());
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
