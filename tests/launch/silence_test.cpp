// Launchers that are stopped, cut off or merely busy; jobs that are suspended.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>

#include <csignal>
#include <fstream>
#include <thread>

#include "launch/launcher_listener.h"

namespace maniple::launched {
namespace {

const std::vector<std::string> kQuick = {"--heartbeat", "0.1", "--silence-limit", "2"};

std::vector<std::string> quick(std::vector<std::string> more) {
  more.insert(more.begin(), kQuick.begin(), kQuick.end());
  return more;
}

/// A shell whose child is stopped between vfork and exec waits in state D.
bool all_stopped(const std::string& mark) {
  const auto all = processes_with(mark);
  return !all.empty() && std::all_of(all.begin(), all.end(), [&](pid_t pid) {
    const char state = state_of(pid);
    return state == 'T' || state == 'D';
  });
}

bool none_stopped(const std::string& mark) {
  const auto all = processes_with(mark);
  return !all.empty() && std::none_of(all.begin(), all.end(), [&](pid_t pid) { return state_of(pid) == 'T'; });
}

TEST(Silence, AStoppedLauncherIsNamedAndRefusedWhenItGoesOn) {
  const RendezvousSpot rendezvous;
  const std::string mark = new_mark();
  const auto first = rendezvous.node("2", 0, quick({"sh", "-c", "echo up; exec sleep 1000"}));
  const auto second = rendezvous.node("2", 1, {"--env", mark, "sh", "-c", "echo up; exec sleep 1000"});
  ASSERT_TRUE(first->wait_for("] up", 60, 2) && second->wait_for("] up", 60, 2)) << first->err() << second->err();
  const pid_t agent = second->agent();
  ::kill(agent, SIGSTOP);
  EXPECT_EQ(first->wait(), 1) << first->err();
  EXPECT_NE(first->err().find("maniple: node 1 (host "), std::string::npos) << first->err();
  EXPECT_NE(first->err().find("is lost: its launcher was silent for "), std::string::npos) << first->err();
  EXPECT_EQ(processes_with(mark).size(), 2u) << "they have not heard of it yet";
  ::kill(agent, SIGCONT);
  EXPECT_EQ(second->wait(), 1) << second->err();
  EXPECT_NE(second->err().find("it has dropped this launcher, which was silent for "), std::string::npos)
      << second->err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

// The launcher of a job is stopped for longer than the limit: the ranks are well, and the job is theirs.
TEST(Silence, AMasterThatGoesOnFindsItsJobRunning) {
  const RendezvousSpot rendezvous;
  const std::string file = rendezvous.folder.path() + "/end";
  const auto first = rendezvous.node("2", 0, quick({worker_program(), "until", file}));
  const auto second = rendezvous.node("2", 1, {worker_program(), "until", file});
  ASSERT_TRUE(first->wait_for("joined", 60, 2) && second->wait_for("joined", 60, 2)) << first->err() << second->err();
  const pid_t agent = first->agent();
  ::kill(agent, SIGSTOP);
  EXPECT_TRUE(second->wait_for("has been silent for ")) << second->err();
  ::kill(agent, SIGCONT);
  std::ofstream(file) << "end\n";
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
}

TEST(Silence, AStoppedMasterIsNoticedByTheOthers) {
  const RendezvousSpot rendezvous;
  const std::string mark = new_mark();
  const auto first = rendezvous.node("2", 0, quick({"--env", mark, "sh", "-c", "echo up; exec sleep 1000"}));
  // What the master was told counts for all: this node has the default of 10 s. It waits for its return no longer than
  // it would for its coming.
  const auto second = rendezvous.node("2", 1, {"--join-timeout", "5", "sh", "-c", "echo up; exec sleep 1000"});
  ASSERT_TRUE(first->wait_for("] up", 60, 2) && second->wait_for("] up", 60, 2)) << first->err() << second->err();
  const pid_t agent = first->agent();
  ::kill(agent, SIGSTOP);
  EXPECT_EQ(second->wait(), 1) << second->err();
  EXPECT_NE(second->err().find("maniple: the master at " + rendezvous.place + " is lost: its launcher was silent for "),
            std::string::npos)
      << second->err();
  ::kill(agent, SIGCONT);
  EXPECT_EQ(first->wait(), 1) << first->err();
  EXPECT_NE(first->err().find("is lost: it has dropped this launcher"), std::string::npos) << first->err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

// With a range the others go on without it.
TEST(Silence, ARangeGoesOnWithoutTheStoppedOne) {
  const RendezvousSpot rendezvous;
  const std::vector<std::string> program =
      quick({"--join-window", "30", "sh", "-c", "echo world $WORLD_SIZE; exec sleep 1000"});
  const auto first = rendezvous.node("1:2", 0, program);
  const auto second = rendezvous.node("1:2", 1, program);
  ASSERT_TRUE(first->wait_for("world 4", 60, 2) && second->wait_for("world 4", 60, 2)) << first->err() << second->err();
  const pid_t agent = second->agent();
  ::kill(agent, SIGSTOP);
  EXPECT_TRUE(first->wait_for("re-formed with 1") && first->wait_for("world 2", 60, 2)) << first->err();
  ::kill(agent, SIGCONT);
  EXPECT_EQ(second->wait(), 1) << second->err();
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait(), 143) << first->err();
}

// The launcher of node 1 waits for its disk (a log that is a pipe without a reader) for longer than the limit.
TEST(Silence, ABusyLauncherIsNotSilent) {
  const RendezvousSpot rendezvous;
  const std::string logs = rendezvous.folder.path() + "/logs";
  ASSERT_EQ(::mkdir(logs.c_str(), 0700), 0);
  const std::string log = logs + "/rank_2.log";
  ASSERT_EQ(::mkfifo(log.c_str(), 0600), 0);
  const auto first = rendezvous.node("2", 0, quick({"sh", "-c", "while sleep 0.5; do echo tick; done"}));
  const auto second = rendezvous.node("2", 1, {"--log-dir", logs, "sh", "-c", "echo up; exec sleep 1000"});
  ASSERT_TRUE(first->wait_for("[rank 0] tick", 60, 10)) << first->err() << "5 s are longer than the limit of 2 s";
  const UniqueFd reader(::open(log.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ASSERT_TRUE(second->wait_for("[rank 2] up")) << second->err() << first->err();
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait(), 143) << first->err();
  EXPECT_EQ(second->wait(), 143) << second->err();
  EXPECT_EQ(first->err().find("silent"), std::string::npos) << first->err();
}

// Ctrl-Z on one node: half a job would take the other half for dead.
TEST(Suspend, OneNodeStopsAllAndContinuesAll) {
  const RendezvousSpot rendezvous;
  const std::string mark = new_mark();
  const std::vector<std::string> program =
      quick({"--env", mark, "sh", "-c", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"});
  const auto first = rendezvous.node("2", 0, program);
  const auto second = rendezvous.node("2", 1, program);
  ASSERT_TRUE(first->wait_for("] up", 60, 2) && second->wait_for("] up", 60, 2)) << first->err() << second->err();
  second->signal(SIGTSTP);
  EXPECT_TRUE(becomes_true([&] { return all_stopped(mark); }));
  EXPECT_TRUE(becomes_true([&] { return state_of(second->pid()) == 'T'; }));
  EXPECT_TRUE(first->wait_for("maniple: suspended on host ")) << first->err();
  second->signal(SIGCONT);
  EXPECT_TRUE(becomes_true([&] { return none_stopped(mark); }));
  EXPECT_TRUE(first->wait_for("maniple: continued on host ")) << first->err();

  // Ended while it is suspended: workers can save all the same.
  second->signal(SIGTSTP);
  EXPECT_TRUE(becomes_true([&] { return all_stopped(mark); }));
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait(), 143) << first->err();
  second->signal(SIGCONT);
  EXPECT_EQ(second->wait(), 143) << second->err();
  EXPECT_EQ(first->count("saved") + second->count("saved"), 4) << first->out() << second->out();
}

// The ranks' own watch (0.5 s here) does not take a suspended job for a dead one.
TEST(Suspend, RanksGoOnWhereTheyWere) {
  const harness::TemporaryDirectory folder;
  const std::string mark = new_mark();
  const std::string file = folder.path() + "/end";
  Launched job({"run", "-n", "3", "--env", mark, "--env", "MANIPLE_HEARTBEAT=0.5", worker_program(), "until", file});
  ASSERT_TRUE(job.wait_for("joined", 60, 3)) << job.err();
  job.signal(SIGTSTP);
  ASSERT_TRUE(becomes_true([&] { return all_stopped(mark); }));
  // sleep: silence longer than the ranks' limit is what is tested
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  job.signal(SIGCONT);
  ASSERT_TRUE(becomes_true([&] { return none_stopped(mark); }));
  std::ofstream(file) << "end\n";
  EXPECT_EQ(job.wait(), 0) << job.err();
}

}  // namespace
}  // namespace maniple::launched
