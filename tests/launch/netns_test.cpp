// Two and three machines, as network namespaces.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <regex>

#include <fmt/format.h>

#include "harness/start_process.h"
#include "harness/temporary_directory.h"
#include "launch/launched.h"
#include "tools/bench/virtual_network.h"

namespace maniple::launched {
namespace {

using bench::InsideNamespace;
using Network = bench::VirtualNetwork;

std::unique_ptr<Launched> inside(const Network& network, int host, const std::vector<std::string>& arguments) {
  const InsideNamespace here(network.descriptor(host));
  return std::make_unique<Launched>(arguments);
}

TEST(Machines, ThreeMeetAndComputeAcross) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Network network(3);
  const harness::TemporaryDirectory folder;
  harness::write_secret(folder.path() + "/secret");
  std::vector<std::unique_ptr<Launched>> nodes;
  for (const int host : {2, 0, 1}) {
    nodes.push_back(
        inside(network, host,
               {"run", "--nnodes", "3", "--node-rank", std::to_string(host), "--master", Network::address(0) + ":29500",
                "--secret-file", folder.path() + "/secret", "-n", "2", worker_program(), "join"}));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->wait(), 0) << node->err();
  EXPECT_NE(nodes[0]->out().find("[rank 5] sum 15 of 6"), std::string::npos) << nodes[0]->out();
}

TEST(Machines, HostsByAStandInForSsh) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Network network(3);
  const harness::TemporaryDirectory folder;
  const std::string path = folder.path() + "/ssh";
  {
    std::ofstream script(path);
    script << "#!/bin/sh\ncase $1 in\n";
    for (const int host : {1, 2}) script << Network::address(host) << ") name=" << network.path(host) << ";;\n";
    script << "esac\nshift\nexec nsenter --net=$name sh -c \"$*\"\n";
  }
  ::chmod(path.c_str(), 0755);
  const std::string mark = new_mark();
  const auto launched = inside(network, 0,
                               {"run", "--hosts", Network::address(1) + ":2," + Network::address(2) + ":2", "--rsh",
                                path, worker_program(), "join"});
  EXPECT_EQ(launched->wait(), 0) << launched->err();
  EXPECT_NE(launched->out().find("[rank 3] sum 6 of 4"), std::string::npos) << launched->out() << launched->err();

  // The launcher is killed: the agents on the other machines end everything.
  const auto cut = inside(network, 0,
                          {"run", "--hosts", Network::address(1) + ":1," + Network::address(2) + ":1", "--rsh", path,
                           "--env", mark, "sh", "-c", "echo up; sleep 1000"});
  ASSERT_TRUE(cut->wait_for("[rank 0] up") && cut->wait_for("[rank 1] up")) << cut->err();
  cut->signal(SIGKILL);
  EXPECT_EQ(cut->wait(), 137);
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }, 30));
}

// The cable is cut between them: both sides say so, and nothing is left on either.
TEST(Machines, ACutNetworkIsNoticedOnBothSides) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  Network network(2);
  const harness::TemporaryDirectory folder;
  harness::write_secret(folder.path() + "/secret");
  const std::string mark = new_mark();
  std::vector<std::unique_ptr<Launched>> nodes;
  for (const int host : {0, 1}) {
    nodes.push_back(inside(network, host,
                           {"run", "--nnodes", "2", "--node-rank", std::to_string(host), "--master",
                            Network::address(0) + ":29500", "--secret-file", folder.path() + "/secret", "--heartbeat",
                            "0.1", "--silence-limit", "2", "--env", mark, "sh", "-c", "echo up; exec sleep 1000"}));
  }
  for (const auto& node : nodes) ASSERT_TRUE(node->wait_for("] up")) << node->err();
  network.set_link(1, "nomaster");
  for (const auto& node : nodes) {
    EXPECT_EQ(node->wait(), 1) << node->err();
    EXPECT_NE(node->err().find("is lost: its launcher was silent for "), std::string::npos) << node->err();
  }
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

// The ranks notice the cut before the launchers do. The master's side sees none of the cut-off ranks end.
TEST(Machines, TheHeadlineAfterACutNamesARankBeyondIt) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  Network network(2);
  const harness::TemporaryDirectory folder;
  harness::write_secret(folder.path() + "/secret");
  const std::string mark = new_mark();
  std::vector<std::unique_ptr<Launched>> nodes;
  for (const int host : {0, 1}) {
    nodes.push_back(inside(network, host,
                           {"run",
                            "--nnodes",
                            "2",
                            "--node-rank",
                            std::to_string(host),
                            "--master",
                            Network::address(0) + ":29500",
                            "--secret-file",
                            folder.path() + "/secret",
                            "-n",
                            "2",
                            "--heartbeat",
                            "0.1",
                            "--silence-limit",
                            "10",
                            "--env",
                            mark,
                            "--env",
                            "MANIPLE_HEARTBEAT=0.5",
                            worker_program(),
                            "until",
                            folder.path() + "/end"}));
  }
  for (const auto& node : nodes) ASSERT_TRUE(node->wait_for("joined", 60, 2)) << node->err();
  network.set_link(1, "nomaster");
  for (const auto& node : nodes) EXPECT_EQ(node->wait(), 1) << node->err();
  const std::regex headline(
      "maniple: rank [23] of 4 failed first, but has not ended \\(stopped, cut off, or busy\\?\\); rank [01] ended "
      "because of it");
  EXPECT_TRUE(std::regex_search(nodes[0]->err(), headline)) << nodes[0]->err();
  EXPECT_EQ(nodes[1]->err().find("failed first"), std::string::npos) << "it cannot know: " << nodes[1]->err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

/// A stand-in for ssh, which no cable can cut: stand_in ADDRESS COMMAND.
std::string stand_in(const Network& network, const std::string& folder) {
  const std::string path = folder + "/ssh";
  std::ofstream script(path);
  script << "#!/bin/sh\ncase $1 in\n";
  for (int host = 1; host < network.hosts(); ++host)
    script << Network::address(host) << ") name=" << network.path(host) << ";;\n";
  script << "esac\nshift\nexec nsenter --net=$name sh -c \"$*\"\n";
  script.close();
  ::chmod(path.c_str(), 0755);
  return path;
}

// One host is cut off from the others, but not from the launcher: all ranks report whom they lost. The rank that most
// of them blame is the headline, whoever ends first.
TEST(Machines, TheHeadlineNamesTheRankThatMostRanksLost) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Network network(5);
  const harness::TemporaryDirectory folder;
  const std::string mark = new_mark();
  std::string hosts;
  for (int host = 1; host < 5; ++host) hosts += (host == 1 ? "" : ",") + Network::address(host) + ":1";
  const auto launched = inside(network, 0,
                               {"run", "--hosts", hosts, "--rsh", stand_in(network, folder.path()), "--env", mark,
                                "--env", "MANIPLE_HEARTBEAT=0.5", worker_program(), "until", folder.path() + "/end"});
  ASSERT_TRUE(launched->wait_for("joined", 60, 4)) << launched->err();
  for (int host = 1; host < 4; ++host) {
    network.run_on(host, "ip route add blackhole " + Network::address(4));
    network.run_on(4, "ip route add blackhole " + Network::address(host));
  }
  EXPECT_EQ(launched->wait(), 1) << launched->err();
  EXPECT_NE(launched->err().find("maniple: rank 3 of 4 failed first"), std::string::npos) << launched->err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

// A host is cut off for longer than the limit. Its agent comes back, or the one that is started again does; the job
// goes on.
TEST(Machines, AHostThatWasCutOffComesBack) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  Network network(3);
  const harness::TemporaryDirectory folder;
  const std::string mark = new_mark();
  const auto launched =
      inside(network, 0,
             {"run", "--hosts", Network::address(1) + ":1," + Network::address(2) + ":1", "--rsh",
              stand_in(network, folder.path()), "--max-restarts", "3", "--restart-delay", "0.1", "--heartbeat", "0.1",
              "--silence-limit", "2", "--env", mark, "sh", "-c", "echo up $MANIPLE_RESTART_COUNT; exec sleep 1000"});
  ASSERT_TRUE(launched->wait_for("up 0", 60, 2)) << launched->err();
  network.set_link(2, "nomaster");
  ASSERT_TRUE(launched->wait_for("its agent is started again")) << launched->err();
  network.set_link(2, "master bridge");
  ASSERT_TRUE(launched->wait_for("[rank 0] up 1") && launched->wait_for("[rank 1] up 1"))
      << launched->out() << launched->err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).size() == 2; })) << "one start is left of each rank";
  launched->signal(SIGTERM);
  EXPECT_EQ(launched->wait(), 143) << launched->err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

/// Gives the machines addresses of IPv6 only.
void make_version_six(const Network& network) {
  for (int host = 0; host < network.hosts(); ++host) {
    for (const std::string& words :
         {std::string("flush dev eth0"), fmt::format("add fd77::{}/64 dev eth0 nodad", host + 1),
          std::string("del 127.0.0.1/8 dev lo")}) {
      ASSERT_EQ(std::system(fmt::format("nsenter --net={} ip addr {}", network.path(host), words).c_str()), 0);
    }
  }
}

TEST(Machines, VersionSixOnly) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Network network(2);
  ASSERT_NO_FATAL_FAILURE(make_version_six(network));
  const harness::TemporaryDirectory folder;
  harness::write_secret(folder.path() + "/secret");
  std::vector<std::unique_ptr<Launched>> nodes;
  for (const int host : {1, 0}) {
    nodes.push_back(inside(network, host,
                           {"run", "--nnodes", "2", "--node-rank", std::to_string(host), "--master", "[fd77::1]:29500",
                            "--secret-file", folder.path() + "/secret", "-n", "2", worker_program(), "join"}));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->wait(), 0) << node->err();
  EXPECT_NE(nodes[0]->out().find("[rank 3] sum 6 of 4"), std::string::npos) << nodes[0]->out();

  // A job of one machine, and hosts from a file, over a stand-in for ssh.
  const auto alone = inside(network, 0, {"run", "-n", "2", "--master", "[::1]:0", worker_program(), "join"});
  EXPECT_EQ(alone->wait(), 0) << alone->err();
  const std::string shell = folder.path() + "/ssh", hosts = folder.path() + "/hosts";
  std::ofstream(shell) << "#!/bin/sh\n[ $1 = fd77::2 ] || exit 1\nshift\nexec nsenter --net=" << network.path(1)
                       << " sh -c \"$*\"\n";
  ::chmod(shell.c_str(), 0755);
  for (const char* line : {"fd77::2 slots=2\n", "[fd77::2]:2\n", "[fd77::2] 2 # a comment\n"}) {
    std::ofstream(hosts) << "localhost 1\n" << line;
    const auto job = inside(network, 0, {"run", "--hostfile", hosts, "--rsh", shell, worker_program(), "join"});
    EXPECT_EQ(job->wait(), 0) << line << job->err();
    EXPECT_NE(job->out().find("[rank 2] sum 3 of 3"), std::string::npos) << line << job->out() << job->err();
  }
}

}  // namespace
}  // namespace maniple::launched
