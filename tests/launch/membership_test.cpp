// Nodes that come and go at bad moments: while a port is reserved, while the group is stopped, after a rank has
// finished.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <csignal>
#include <fstream>

#include <fmt/format.h>

#include "launch/launcher_listener.h"

namespace maniple::launched {
namespace {

pid_t child_of(pid_t pid) {
  pid_t child = 0;
  std::ifstream(fmt::format("/proc/{}/task/{}/children", pid, pid)) >> child;
  return child;
}

// The agent that is to reserve the port of the second start is frozen: the other one, which runs nothing, is not waited
// for.
TEST(Membership, AnAgentFrozenWhileThePortIsReservedEndsTheJob) {
  const std::string mark = new_mark();
  const auto equals = mark.find('=');
  const harness::TemporaryDirectory folder;
  const std::string shell = folder.path() + "/shell";
  std::ofstream(shell) << "#!/bin/sh\nshift\nexec sh -c \"$*\"\n";
  ::chmod(shell.c_str(), 0755);
  Launched job(
      {"run", "--hosts", "127.0.0.2:1,127.0.0.3:1", "--rsh", shell, "--heartbeat", "0.2", "--silence-limit", "3",
       "--max-restarts", "1", "--restart-delay", "1", "sh", "-c", "[ $RANK = 1 ] && exit 3; exec sleep 1000"},
      {.env = {{mark.substr(0, equals), mark.substr(equals + 1)}}});
  ASSERT_TRUE(job.wait_for("(restart 1 of 1)")) << job.err();
  const pid_t agent = child_of(child_of(agent_of(mark, "0")));
  ASSERT_GT(agent, 0);
  ASSERT_TRUE(becomes_true([&] { return child_of(agent) == 0; })) << "its worker has ended";
  ::kill(agent, SIGSTOP);
  const int code = job.wait();
  ::kill(agent, SIGCONT);
  EXPECT_EQ(code, 1) << job.err();
  EXPECT_NE(job.err().find("maniple: node 0 (host 127.0.0.2) is lost: its launcher was silent"), std::string::npos)
      << job.err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

TEST(Membership, TwoNodesLostOneAfterTheOtherEndTheJob) {
  const RendezvousSpot rendezvous;
  const std::string mark = new_mark();
  const std::vector<std::string> program = {"--env", mark, "sh", "-c",
                                            "trap '' TERM; echo up; while :; do sleep 0.05; done"};
  const auto first = rendezvous.node("2:3", 0, program);
  const auto second = rendezvous.node("2:3", 1, program);
  const auto third = rendezvous.node("2:3", 2, program);
  for (const auto* node : {&first, &second, &third}) ASSERT_TRUE((*node)->wait_for("] up", 60, 2)) << (*node)->err();
  second->signal(SIGKILL);
  ASSERT_TRUE(first->wait_for("re-formed with 2")) << first->err();
  third->signal(SIGKILL);
  EXPECT_EQ(first->wait(), 1) << first->err();
  EXPECT_EQ(first->count(" is lost: "), 2) << first->err();
  EXPECT_NE(first->err().find("; nodes left: 1, --nnodes needs 2 or more"), std::string::npos) << first->err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

// Rank 0 has finished when the second node comes, and does not run again.
TEST(Membership, ANodeThatComesAfterARankHasFinishedIsRefused) {
  const RendezvousSpot rendezvous;
  const std::string end = rendezvous.folder.path() + "/end", pid = rendezvous.folder.path() + "/pid";
  const auto node = [&](int rank) {
    return rendezvous.node("1:2", rank,
                           {"--join-window", "0.2", "sh", "-c",
                            "echo run; if [ $RANK = 0 ]; then echo $$ >$0.new; mv $0.new $0; exit 0; fi; "
                            "while ! [ -e $0 ] || kill -0 $(cat $0) 2>/dev/null; do sleep 0.01; done; echo alone; "
                            "while ! [ -e $1 ]; do sleep 0.01; done",
                            pid, end});
  };
  const auto first = node(0);
  ASSERT_TRUE(first->wait_for("[rank 1] alone")) << first->err();
  const auto second = node(1);
  EXPECT_EQ(second->wait(), 1) << second->err();
  EXPECT_NE(second->err().find("has finished already, and what has finished does not run again"), std::string::npos)
      << second->err();
  std::ofstream(end) << "end\n";
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(first->count("[rank 0] run"), 1) << first->out();
}

}  // namespace
}  // namespace maniple::launched
