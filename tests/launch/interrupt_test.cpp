// Signals to the launcher: Ctrl-C, SIGTERM and user signals.
#include <gtest/gtest.h>

#include <csignal>

#include "launch/launched.h"

namespace maniple::launched {
namespace {

TEST(Interrupt, WorkersCanSave) {
  Launched launched(
      {"run", "-n", "2", "sh", "-c", "trap 'echo saved; exit 0' INT; echo up; while :; do sleep 0.05; done"});
  ASSERT_TRUE(becomes_true([&] { return launched.wait_for("[rank 0] up") && launched.wait_for("[rank 1] up"); }));
  launched.signal(SIGINT);
  EXPECT_EQ(launched.wait(), 130);
  EXPECT_EQ(launched.count("saved"), 2) << launched.out();
  EXPECT_NE(launched.err().find("Ctrl-C again ends them"), std::string::npos) << launched.err();
}

TEST(Interrupt, ASecondOneEndsAtOnce) {
  const std::string mark = new_mark();
  Launched launched(
      {"run", "-n", "2", "--env", mark, "sh", "-c", "trap '' INT TERM; echo up; while :; do sleep 0.05; done"});
  ASSERT_TRUE(launched.wait_for("[rank 0] up") && launched.wait_for("[rank 1] up"));
  launched.signal(SIGINT);
  ASSERT_TRUE(launched.wait_for("Ctrl-C again ends them"));
  launched.signal(SIGINT);
  EXPECT_EQ(launched.wait(25), 130) << "well before the 30 s of grace are over";
  EXPECT_TRUE(processes_with(mark).empty());
}

TEST(Interrupt, SigtermIsPassedOn) {
  Launched launched(
      {"run", "-n", "2", "sh", "-c", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"});
  ASSERT_TRUE(launched.wait_for("[rank 0] up") && launched.wait_for("[rank 1] up"));
  launched.signal(SIGTERM);
  EXPECT_EQ(launched.wait(), 143);
  EXPECT_EQ(launched.count("saved"), 2);
}

// A stopped worker could not act on the signal, and the stop would take the 30 s of grace.
TEST(Interrupt, StoppedWorkersAreContinued) {
  const std::string mark = new_mark();
  Launched launched({"run", "-n", "2", "--env", mark, "sh", "-c",
                     "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"});
  ASSERT_TRUE(launched.wait_for("[rank 0] up") && launched.wait_for("[rank 1] up"));
  for (const pid_t pid : processes_with(mark)) ::kill(pid, SIGSTOP);
  launched.signal(SIGTERM);
  EXPECT_EQ(launched.wait(25), 143) << "well before the 30 s of grace are over";
  EXPECT_EQ(launched.count("saved"), 2) << launched.out();
  EXPECT_TRUE(processes_with(mark).empty());
}

TEST(Interrupt, AStoppedAgentIsContinued) {
  const std::string mark = new_mark();
  Launched launched({"run", "-n", "2", "--env", mark, "sh", "-c", "echo up; exec sleep 1000"});
  ASSERT_TRUE(launched.wait_for("[rank 0] up") && launched.wait_for("[rank 1] up"));
  for (const pid_t pid : {launched.agent(), launched.reaper()}) {
    ::kill(pid, SIGSTOP);
    ASSERT_TRUE(becomes_true([&] { return state_of(pid) == 'T'; }));
  }
  launched.signal(SIGTERM);
  EXPECT_EQ(launched.wait(25), 143) << launched.err();
  EXPECT_TRUE(processes_with(mark).empty());
}

TEST(Interrupt, UserSignalsReachTheWorkers) {
  Launched launched(
      {"run", "-n", "2", "sh", "-c", "trap 'echo signalled; exit 0' USR1; echo up; while :; do sleep 0.05; done"});
  ASSERT_TRUE(launched.wait_for("[rank 0] up") && launched.wait_for("[rank 1] up"));
  launched.signal(SIGUSR1);
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_EQ(launched.count("signalled"), 2);
}

}  // namespace
}  // namespace maniple::launched
