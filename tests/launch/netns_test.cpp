// Two and three machines, as network namespaces.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <csignal>
#include <fstream>

#include "harness/network.h"
#include "harness/start_process.h"
#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {
namespace {

using harness::InsideNamespace;
using harness::Network;

std::unique_ptr<Launched> inside(const Network& network, int host, const std::vector<std::string>& arguments) {
  const InsideNamespace here(network.name_of(host));
  return std::make_unique<Launched>(arguments);
}

TEST(Machines, ThreeMeetAndComputeAcross) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Network network(3, 0);
  const harness::TemporaryDirectory folder;
  harness::write_secret(folder.path() + "/secret");
  std::vector<std::unique_ptr<Launched>> nodes;
  for (const int host : {2, 0, 1}) {
    nodes.push_back(inside(network, host, {"run", "--nnodes", "3", "--node-rank", std::to_string(host), "--master", Network::address(0) + ":29500", "--secret-file",
                                           folder.path() + "/secret", "-n", "2", worker_program(), "join"}));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->wait(), 0) << node->err();
  EXPECT_NE(nodes[0]->out().find("[rank 5] sum 15 of 6"), std::string::npos) << nodes[0]->out();
}

TEST(Machines, HostsByAStandInForSsh) {
  if (const std::string why = Network::why_not(); !why.empty()) GTEST_SKIP() << why;
  const Network network(3, 0);
  const harness::TemporaryDirectory folder;
  const std::string path = folder.path() + "/ssh";
  {
    std::ofstream script(path);
    script << "#!/bin/sh\ncase $1 in\n";
    for (const int host : {1, 2}) script << Network::address(host) << ") name=" << network.name_of(host) << ";;\n";
    script << "esac\nshift\nexec ip netns exec $name sh -c \"$*\"\n";
  }
  ::chmod(path.c_str(), 0755);
  const std::string mark = new_mark();
  const auto launched = inside(network, 0, {"run", "--hosts", Network::address(1) + ":2," + Network::address(2) + ":2", "--rsh", path, worker_program(), "join"});
  EXPECT_EQ(launched->wait(), 0) << launched->err();
  EXPECT_NE(launched->out().find("[rank 3] sum 6 of 4"), std::string::npos) << launched->out() << launched->err();

  // The launcher is killed: the agents on the other machines end everything.
  const auto cut = inside(network, 0, {"run", "--hosts", Network::address(1) + ":1," + Network::address(2) + ":1", "--rsh", path, "--env", mark, "sh", "-c", "echo up; sleep 1000"});
  ASSERT_TRUE(cut->wait_for("[rank 0] up") && cut->wait_for("[rank 1] up")) << cut->err();
  cut->signal(SIGKILL);
  EXPECT_EQ(cut->wait(), 137);
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }, 30));
}

}  // namespace
}  // namespace maniple::launched
