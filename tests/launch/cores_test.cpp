// Which cores ranks get: on machines that a stand-in for /sys describes, beside other jobs, and in real processes.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <csignal>
#include <fstream>
#include <set>

#include <fmt/format.h>

#include "launch/placement/binding.h"
#include "launch/placement/core_claim.h"
#include "launch/launcher_listener.h"
#include <maniple/comm/error.h>

namespace maniple::launched {
namespace {

using launch::bind_ranks;
using launch::choose_cores;
using launch::Cpu;
using launch::HeldCores;
using Blocks = std::vector<std::vector<int>>;

/// /sys/devices/system/cpu of a machine as Linux numbers it: first one hardware thread of every core, then the others.
struct Machine {
  Machine(int packages, int cores, int threads) {
    for (int id = 0; id < packages * cores * threads; ++id) {
      const int core = id % (packages * cores);
      const std::string own = fmt::format("{}/cpu{}", folder.path(), id);
      ::mkdir(own.c_str(), 0755);
      ::mkdir((own + "/topology").c_str(), 0755);
      ::mkdir(fmt::format("{}/node{}", own, core / cores).c_str(), 0755);
      std::ofstream(own + "/topology/physical_package_id") << core / cores << "\n";
      std::ofstream(own + "/topology/core_id") << core % cores << "\n";  // counts anew in each package
      ids.push_back(id);
    }
  }
  std::vector<Cpu> cpus() const { return launch::describe_ids(ids, folder.path()); }
  harness::TemporaryDirectory folder;
  std::vector<int> ids;
};

TEST(Cores, TwoSocketsWithHardwareThreads) {
  const Machine machine(2, 4, 2);  // cores 0-3 and 4-7; their second threads are 8-11 and 12-15
  const auto cpus = machine.cpus();
  EXPECT_EQ(bind_ranks(cpus, 2), (Blocks{{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}})) << "a socket each";
  EXPECT_EQ(bind_ranks(cpus, 4), (Blocks{{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}}));
  EXPECT_EQ(bind_ranks(cpus, 8), (Blocks{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}})) << "a core each, both threads";
  // More ranks than cores: then hardware threads, each for one rank.
  const Blocks all = bind_ranks(cpus, 16);
  ASSERT_EQ(all.size(), 16u);
  std::set<int> used;
  for (const auto& block : all) {
    ASSERT_EQ(block.size(), 1u);
    EXPECT_TRUE(used.insert(block.front()).second);
  }
  EXPECT_TRUE(bind_ranks(cpus, 17).empty());
  EXPECT_TRUE(bind_ranks(cpus, 0).empty());
  EXPECT_TRUE(bind_ranks({}, 1).empty());
}

TEST(Cores, SoManyForEachRank) {
  const Machine machine(2, 4, 2);
  const auto cpus = machine.cpus();
  EXPECT_EQ(bind_ranks(cpus, 1, 2), (Blocks{{0, 1, 8, 9}}));
  EXPECT_EQ(bind_ranks(cpus, 2, 3), (Blocks{{0, 1, 2, 8, 9, 10}, {4, 5, 6, 12, 13, 14}})) << "no block on two sockets";
  EXPECT_EQ(bind_ranks(cpus, 1, 6).front().size(), 12u) << "larger than a socket: it must";
  EXPECT_TRUE(bind_ranks(cpus, 3, 3).empty());
}

TEST(Cores, ARestrictedLauncherSharesOutWhatItHas) {
  Machine machine(2, 4, 2);
  machine.ids = {2, 10, 6};
  EXPECT_EQ(bind_ranks(machine.cpus(), 2), (Blocks{{2, 10}, {6}}));
}

TEST(Cores, AMachineThatSaysNothing) {
  const auto cpus = launch::describe_ids({0, 1, 2}, "/no/such/folder");
  EXPECT_EQ(bind_ranks(cpus, 3), (Blocks{{0}, {1}, {2}}));
}

TEST(Cores, OthersAreLeftAlone) {
  const Machine machine(2, 4, 2);
  const auto cpus = machine.cpus();
  // One hardware thread of core 0 is taken: the core is.
  const HeldCores other{.job = "other", .generation = 3, .pid = 7, .cpus = {8, 1, 2, 3}};
  auto choice = choose_cores({.job = "mine", .count = 4, .total = 4}, cpus, {other});
  EXPECT_EQ(choice.cpus, (Blocks{{4, 12}, {5, 13}, {6, 14}, {7, 15}}));
  EXPECT_EQ(choice.threads, 1);
  choice = choose_cores({.job = "mine", .count = 9, .total = 9}, cpus, {other});
  EXPECT_TRUE(choice.cpus.empty());
  EXPECT_EQ(choice.why_not, "9 ranks on this machine, 4 of its 8 cores free: job other (pid 7) has 8,1-3");
  choice = choose_cores({.job = "mine", .count = 1, .total = 1}, cpus, {});
  EXPECT_EQ(choice.threads, 8) << "physical cores, not hardware threads";
}

TEST(Cores, LaunchersOfOneJobDivideTheMachine) {
  const Machine machine(2, 4, 2);
  const auto cpus = machine.cpus();
  const auto a = choose_cores({.job = "mine", .first = 0, .count = 2, .total = 4}, cpus, {});
  const HeldCores held{.job = "mine", .pid = 1, .cpus = {0, 1, 2, 3, 8, 9, 10, 11}};
  const auto b = choose_cores({.job = "mine", .first = 2, .count = 2, .total = 4}, cpus, {held});
  EXPECT_EQ(a.cpus, (Blocks{{0, 1, 8, 9}, {2, 3, 10, 11}}));
  EXPECT_EQ(b.cpus, (Blocks{{4, 5, 12, 13}, {6, 7, 14, 15}}));
  // What the other has is not what this one computes with: rather none than the same.
  const HeldCores odd{.job = "mine", .pid = 1, .cpus = {4}};
  EXPECT_TRUE(choose_cores({.job = "mine", .first = 2, .count = 2, .total = 4}, cpus, {odd}).cpus.empty());
  // Of the start before this one: it does not count.
  EXPECT_FALSE(choose_cores({.job = "mine", .generation = 1, .first = 2, .count = 2, .total = 4}, cpus, {odd}).cpus.empty());
}

TEST(Cores, AClaimIsReadAsItWasWritten) {
  const HeldCores held{.job = "run-1", .generation = 2, .pid = 77, .cpus = {0, 5}};
  EXPECT_EQ(launch::decode_held(launch::encode_held(held)), held);
  for (const char* text : {"", "maniple-cores-1 j", "maniple-cores-1 j 0 1 2", "maniple-cores-1 j 0 1 -2\n", "other j 0 1 2\n", "maniple-cores-1 j 0 1 2 x\n"}) {
    EXPECT_THROW(launch::decode_held(text), InvalidArgument) << text;
  }
}

/// Jobs that see each other and no others.
struct Jobs {
  harness::TemporaryDirectory folder;
  Setting setting() const { return {.env = {{"XDG_RUNTIME_DIR", folder.path()}}}; }
};
const std::vector<std::string> kShow = {"sh", "-c", "echo cores $(grep Cpus_allowed_list /proc/self/status); exec sleep 1000"};

std::unique_ptr<Launched> start(const Jobs& jobs, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "run");
  arguments.insert(arguments.end(), kShow.begin(), kShow.end());
  return std::make_unique<Launched>(arguments, jobs.setting());
}

/// The different lists of cores that ranks have printed.
std::set<std::string> lists(const std::string& out) {
  std::set<std::string> all;
  std::istringstream in(out);
  for (std::string line; std::getline(in, line);) all.insert(line.substr(line.rfind(' ') + 1));
  return all;
}

TEST(Cores, OfRealJobs) {
  if (launch::allowed_cpu_count() < 2) GTEST_SKIP() << "needs two cores";
  const Jobs jobs;
  const auto free = start(jobs, {"-n", "2", "--bind", "none"});
  ASSERT_TRUE(free->wait_for("Cpus_allowed_list", 60, 2)) << free->err();
  EXPECT_EQ(lists(free->out()).size(), 1u) << free->out();

  auto a = start(jobs, {"--cores-per-process", "1"});
  ASSERT_TRUE(a->wait_for("Cpus_allowed_list")) << a->err();
  const auto b = start(jobs, {"--cores-per-process", "1"});
  ASSERT_TRUE(b->wait_for("Cpus_allowed_list")) << b->err();
  EXPECT_EQ(lists(a->out() + b->out()).size(), 2u) << a->out() << b->out();

  const auto all = std::to_string(launch::allowed_cpu_count());
  const auto c = start(jobs, {"-v", "-n", all});
  ASSERT_TRUE(c->wait_for("Cpus_allowed_list", 60, launch::allowed_cpu_count())) << c->err();
  EXPECT_EQ(lists(c->out()), lists(free->out())) << "not bound, as two cores are not free";
  EXPECT_NE(c->err().find("ranks are not bound to cores: " + all + " ranks on this machine"), std::string::npos) << c->err();

  // A launcher that was killed holds nothing.
  const auto of_a = lists(a->out());
  a->signal(SIGKILL);
  EXPECT_EQ(a->wait(), 137);
  const auto d = start(jobs, {"--cores-per-process", "1"});
  ASSERT_TRUE(d->wait_for("Cpus_allowed_list")) << d->err();
  EXPECT_EQ(lists(d->out()), of_a) << d->out();
}

TEST(Cores, OfRanksOnOneMachine) {
  if (launch::allowed_cpu_count() < 2) GTEST_SKIP() << "needs two cores";
  const Jobs jobs;
  const auto job = start(jobs, {"-n", "2"});
  ASSERT_TRUE(job->wait_for("Cpus_allowed_list", 60, 2)) << job->err();
  EXPECT_EQ(lists(job->out()).size(), 2u) << job->out();
}

TEST(Cores, OfTwoNodesOnOneMachine) {
  if (launch::allowed_cpu_count() < 2) GTEST_SKIP() << "needs two cores";
  const Jobs jobs;
  const RendezvousSpot meeting;
  std::vector<std::unique_ptr<Launched>> nodes;
  for (const char* rank : {"0", "1"}) {
    nodes.push_back(start(jobs, {"--nnodes", "2", "--node-rank", rank, "--master", meeting.place, "--secret-file", meeting.secret}));
  }
  for (const auto& node : nodes) ASSERT_TRUE(node->wait_for("Cpus_allowed_list")) << node->err();
  EXPECT_EQ(lists(nodes[0]->out() + nodes[1]->out()).size(), 2u) << nodes[0]->out() << nodes[1]->out();
}

}  // namespace
}  // namespace maniple::launched
