// Which cores ranks get: on machines that a stand-in for /sys describes, next to other jobs, and in real processes.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <csignal>
#include <fstream>
#include <set>

#include <fmt/format.h>

#include "launch/launcher_listener.h"
#include "launch/placement/binding.h"

namespace maniple::launched {
namespace {

using launch::bind_part;
using launch::bind_ranks;
using launch::Cpu;
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
  EXPECT_EQ(bind_ranks(cpus, 8), (Blocks{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}}))
      << "a core each, both threads";
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

TEST(Cores, LaunchersOfOneJobDivideTheMachine) {
  const Machine machine(2, 4, 2);
  const auto cpus = machine.cpus();
  const auto a = bind_part({.first = 0, .count = 2, .total = 4}, cpus);
  const auto b = bind_part({.first = 2, .count = 2, .total = 4}, cpus);
  EXPECT_EQ(a.cpus, (Blocks{{0, 1, 8, 9}, {2, 3, 10, 11}}));
  EXPECT_EQ(b.cpus, (Blocks{{4, 5, 12, 13}, {6, 7, 14, 15}}));
  EXPECT_EQ(a.threads, 2) << "physical cores, not hardware threads";
  const auto many = bind_part({.count = 17, .total = 17}, cpus);
  EXPECT_TRUE(many.cpus.empty());
  EXPECT_EQ(many.why_not, "17 ranks on 8 cores");
  EXPECT_EQ(bind_part({.count = 3, .total = 3, .cores_per_rank = 3}, cpus).why_not,
            "3 ranks with 3 cores each on 8 cores");
}

/// Jobs that see each other and no others.
struct Jobs {
  harness::TemporaryDirectory folder;
  Setting setting() const { return {.env = {{"XDG_RUNTIME_DIR", folder.path()}}}; }
};
const std::vector<std::string> kShow = {"sh", "-c",
                                        "echo cores $(grep Cpus_allowed_list /proc/self/status); exec sleep 1000"};

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

// Until its record says that a job runs, the next one does not know of it.
bool is_listed(const Jobs& jobs, const Launched& job) {
  return becomes_true([&] {
    return maniple({"ps", "--json"}, jobs.setting()).out.find(fmt::format("\"pid\": {},", job.pid())) !=
           std::string::npos;
  });
}

TEST(Cores, OfRealJobs) {
  if (launch::allowed_cpu_count() < 2) GTEST_SKIP() << "needs two cores";
  const Jobs jobs;
  auto a = start(jobs, {"--cores-per-process", "1"});
  ASSERT_TRUE(a->wait_for("Cpus_allowed_list")) << a->err();
  ASSERT_TRUE(is_listed(jobs, *a));

  // Another job runs: this one is not bound, and says so in one line.
  const auto b = start(jobs, {"-n", "2"});
  ASSERT_TRUE(b->wait_for("Cpus_allowed_list", 60, 2)) << b->err();
  EXPECT_EQ(lists(b->out()).size(), 1u) << b->out();
  EXPECT_NE(lists(b->out()), lists(a->out()));
  EXPECT_NE(b->err().find(fmt::format("(pid {}) of this user runs on this machine (--bind cores binds all the same)\n",
                                      a->pid())),
            std::string::npos)
      << b->err();
  const auto c = start(jobs, {"-n", "2", "--bind", "cores"});
  ASSERT_TRUE(c->wait_for("Cpus_allowed_list", 60, 2)) << c->err();
  EXPECT_EQ(lists(c->out()).size(), 2u) << c->out();
  EXPECT_EQ(c->err(), "");
}

TEST(Cores, NoneAreBoundOnRequest) {
  if (launch::allowed_cpu_count() < 2) GTEST_SKIP() << "needs two cores";
  const Jobs jobs;
  const auto job = start(jobs, {"-v", "-n", "2", "--bind", "none"});
  ASSERT_TRUE(job->wait_for("Cpus_allowed_list", 60, 2)) << job->err();
  EXPECT_EQ(lists(job->out()).size(), 1u) << job->out();
  EXPECT_NE(job->err().find("ranks are not bound to cores: --bind none\n"), std::string::npos) << job->err();
}

// A launcher that was killed leaves its record, which counts no longer.
TEST(Cores, OfAJobAfterOneThatWasKilled) {
  if (launch::allowed_cpu_count() < 2) GTEST_SKIP() << "needs two cores";
  const Jobs jobs;
  auto killed = start(jobs, {});
  ASSERT_TRUE(killed->wait_for("Cpus_allowed_list")) << killed->err();
  ASSERT_TRUE(is_listed(jobs, *killed));
  killed->signal(SIGKILL);
  EXPECT_EQ(killed->wait(), 137);
  const auto job = start(jobs, {"-n", "2"});
  ASSERT_TRUE(job->wait_for("Cpus_allowed_list", 60, 2)) << job->err();
  EXPECT_EQ(lists(job->out()).size(), 2u) << job->out() << job->err();
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
  const RendezvousSpot rendezvous;
  std::vector<std::unique_ptr<Launched>> nodes;
  for (const char* rank : {"0", "1"}) {
    nodes.push_back(start(jobs, {"--nnodes", "2", "--node-rank", rank, "--master", rendezvous.place, "--secret-file",
                                 rendezvous.secret}));
  }
  for (const auto& node : nodes) ASSERT_TRUE(node->wait_for("Cpus_allowed_list")) << node->err();
  EXPECT_EQ(lists(nodes[0]->out() + nodes[1]->out()).size(), 2u) << nodes[0]->out() << nodes[1]->out();
}

}  // namespace
}  // namespace maniple::launched
