// Several nodes: launchers on loopback that find each other, and hosts on which agents are started by a stand-in for
// ssh.
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include <fmt/format.h>

#include "comm/net/address.h"
#include "harness/relay.h"
#include "harness/start_process.h"
#include "harness/temporary_directory.h"
#include "launch/launched.h"
#include "launch/launcher_listener.h"

namespace maniple::launched {
namespace {

using harness::TemporaryDirectory;

TEST(Nodes, AnyMayComeFirst) {
  const RendezvousSpot rendezvous;
  const auto third = rendezvous.node("3", 2, {worker_program(), "join"});
  const auto second = rendezvous.node("3", 1, {worker_program(), "join"});
  const auto first = rendezvous.node("3", 0, {worker_program(), "join"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_EQ(third->wait(), 0) << third->err();
  EXPECT_NE(first->out().find("[rank 1] sum 15 of 6"), std::string::npos) << first->out();
  EXPECT_NE(second->out().find("[rank 2] sum 15 of 6"), std::string::npos) << second->out();
  EXPECT_NE(third->out().find("[rank 5] sum 15 of 6"), std::string::npos) << third->out();
}

TEST(Nodes, MeetAtAnAddressOfVersionSix) {
  RendezvousSpot rendezvous;
  rendezvous.place = fmt::format("[::1]:{}", harness::free_loopback_port());
  const auto second = rendezvous.node("2", 1, {worker_program(), "join"});
  const auto first = rendezvous.node("2", 0, {worker_program(), "join"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_NE(second->out().find("[rank 3] sum 6 of 4"), std::string::npos) << second->out();
  const auto alone = rendezvous.node("2", 1, {"--join-timeout", "0.3", "true"});
  EXPECT_EQ(alone->wait(), 1);
  EXPECT_NE(alone->err().find("no master at " + rendezvous.place), std::string::npos) << alone->err();
}

TEST(Nodes, RanksByArrival) {
  const RendezvousSpot rendezvous;
  const auto a = rendezvous.node("2", -1, {"sh", "-c", "echo node $NODE_RANK $GROUP_WORLD_SIZE"});
  const auto b = rendezvous.node("2", -1, {"sh", "-c", "echo node $NODE_RANK $GROUP_WORLD_SIZE"});
  EXPECT_EQ(a->wait(), 0) << a->err();
  EXPECT_EQ(b->wait(), 0) << b->err();
  const std::string all = a->out() + b->out();
  EXPECT_NE(all.find("[rank 0] node 0 2\n"), std::string::npos) << all;
  EXPECT_NE(all.find("[rank 3] node 1 2\n"), std::string::npos) << all;
}

TEST(Nodes, AMissingOneIsNamed) {
  const RendezvousSpot rendezvous;
  const auto first = rendezvous.node("3", 0, {"--join-timeout", "2", "true"});
  const auto third = rendezvous.node("3", 2, {"--join-timeout", "20", "true"});
  EXPECT_EQ(first->wait(), 1);
  EXPECT_NE(first->err().find("nodes joined; missing node rank"), std::string::npos) << first->err();
  EXPECT_EQ(third->wait(), 1) << third->err();
}

TEST(Nodes, AMasterThatNeverComesIsNamed) {
  const RendezvousSpot rendezvous;
  const auto node = rendezvous.node("2", 1, {"--join-timeout", "0.5", "true"});
  EXPECT_EQ(node->wait(), 1);
  EXPECT_NE(node->err().find("no master at " + rendezvous.place), std::string::npos) << node->err();
}

TEST(Nodes, AFailureEndsAllAndIsShownEverywhere) {
  const RendezvousSpot rendezvous;
  const std::string mark = new_mark();
  const std::vector<std::string> program = {"--env", mark, "sh", "-c", "[ $RANK = 3 ] && exit 9; sleep 1000"};
  const auto first = rendezvous.node("2", 0, program);
  const auto second = rendezvous.node("2", 1, program);
  EXPECT_EQ(first->wait(), 9) << first->err();
  EXPECT_EQ(second->wait(), 9) << second->err();
  for (const auto* node : {&first, &second}) {
    EXPECT_NE((*node)->err().find("maniple: rank 3 of 4 failed first"), std::string::npos) << (*node)->err();
  }
  EXPECT_TRUE(processes_with(mark).empty());
}

// The rank that is missing and those that wait for it are on different nodes.
TEST(Nodes, ARankThatExitsBeforeInitIsNamedAtOnce) {
  const RendezvousSpot rendezvous;
  const auto first = rendezvous.node("2", 0, {worker_program(), "leave", "3"});
  const auto second = rendezvous.node("2", 1, {worker_program(), "leave", "3"});
  EXPECT_EQ(first->wait(), 1) << first->err();
  EXPECT_EQ(second->wait(), 1) << second->err();
  for (const auto* node : {&first, &second}) {
    EXPECT_NE((*node)->err().find("rank 3 of 4 failed first"), std::string::npos) << (*node)->err();
    EXPECT_NE((*node)->err().find("before it called init(), where rank "), std::string::npos) << (*node)->err();
  }
}

TEST(Nodes, RestartTogether) {
  const RendezvousSpot rendezvous;
  const std::vector<std::string> program = {
      "--max-restarts",
      "1",
      "--restart-delay",
      "0.05",
      "sh",
      "-c",
      "[ $RANK = 3 ] && [ $MANIPLE_RESTART_COUNT = 0 ] && exit 9; exec \"$0\" join",
      worker_program()};
  const auto first = rendezvous.node("2", 0, program);
  const auto second = rendezvous.node("2", 1, program);
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_NE(first->out().find("[rank 0] sum 6 of 4 restart 1"), std::string::npos) << first->out();
}

TEST(Nodes, ALostLauncherEndsTheJob) {
  const RendezvousSpot rendezvous;
  const std::string mark = new_mark();
  for (const bool master : {false, true}) {
    const auto first = rendezvous.node("2", 0, {"--env", mark, "sh", "-c", "echo up; sleep 1000"});
    const auto second = rendezvous.node("2", 1, {"--env", mark, "sh", "-c", "echo up; sleep 1000"});
    ASSERT_TRUE(first->wait_for("] up") && second->wait_for("] up")) << first->err() << second->err();
    (master ? first : second)->signal(SIGKILL);
    const auto& survivor = master ? second : first;
    EXPECT_EQ(survivor->wait(), 1) << survivor->err();
    EXPECT_NE(survivor->err().find("is lost"), std::string::npos) << survivor->err();
    EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
  }
}

// Someone on the path lets the launchers meet, and then changes a byte of the master's messages.
TEST(Nodes, WhatWasChangedOnTheWayIsNotExecuted) {
  const RendezvousSpot rendezvous;
  constexpr std::size_t kBehindTheHandshake = 200;
  const harness::Relay relay(Address::parse(rendezvous.place),
                             [](harness::Relay::Way way, std::size_t offset, std::string bytes) {
                               if (way == harness::Relay::to_dialler && offset <= kBehindTheHandshake &&
                                   offset + bytes.size() > kBehindTheHandshake) {
                                 bytes[kBehindTheHandshake - offset] ^= 1;
                               }
                               return bytes;
                             });
  const std::string trace = rendezvous.folder.path() + "/trace";
  const auto first = rendezvous.node("2", 0, {"sleep", "1000"});
  RendezvousSpot misled;
  misled.place = relay.address().to_string();
  misled.secret = rendezvous.secret;
  const auto second = misled.node("2", 1, {"touch", trace});
  EXPECT_EQ(second->wait(), 1) << second->err();
  EXPECT_NE(second->err().find("not authentic"), std::string::npos) << second->err();
  first->signal(SIGINT);
  first->wait();
  EXPECT_NE(::access(trace.c_str(), F_OK), 0) << "something was executed";
}

TEST(Nodes, CtrlCOnOneEndsAll) {
  const RendezvousSpot rendezvous;
  const std::vector<std::string> program = {"sh", "-c",
                                            "trap 'echo saved; exit 0' INT; echo up; while :; do sleep 0.05; done"};
  const auto first = rendezvous.node("2", 0, program);
  const auto second = rendezvous.node("2", 1, program);
  ASSERT_TRUE(first->wait_for("[rank 0] up") && first->wait_for("[rank 1] up"));
  ASSERT_TRUE(second->wait_for("[rank 2] up") && second->wait_for("[rank 3] up"));
  second->signal(SIGINT);
  EXPECT_EQ(first->wait(), 130) << first->err();
  EXPECT_EQ(second->wait(), 130) << second->err();
  EXPECT_EQ(first->count("saved") + second->count("saved"), 4);
}

TEST(Nodes, AReaderThatGoesOnOneEndsAll) {
  const RendezvousSpot rendezvous;
  const std::string mark = new_mark();
  const auto first = rendezvous.node("2", 0, {"-q", "--env", mark, "sleep", "1000"});
  const auto second = rendezvous.node("2", 1, {"--env", mark, "yes"});
  ASSERT_TRUE(second->wait_for("] y")) << second->err();
  second->close_output();
  EXPECT_EQ(second->wait(), 141) << second->err();
  EXPECT_EQ(first->wait(), 141) << first->err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

TEST(Nodes, ARangeGrowsShrinksAndIsFullAtLast) {
  const RendezvousSpot rendezvous;
  const std::vector<std::string> program = {"--join-window", "0.2", "sh", "-c", "echo world $WORLD_SIZE; sleep 1000"};
  const auto first = rendezvous.node("1:2", 0, program);
  ASSERT_TRUE(first->wait_for("world 2", 60, 2)) << first->err();
  auto second = rendezvous.node("1:2", -1, program);
  ASSERT_TRUE(first->wait_for("world 4")) << first->err();
  ASSERT_TRUE(second->wait_for("world 4")) << second->err();
  const auto third = rendezvous.node("1:2", -1, program);
  EXPECT_EQ(third->wait(), 1);
  EXPECT_NE(third->err().find("has all of its 2 nodes"), std::string::npos) << third->err();
  second->signal(SIGKILL);
  ASSERT_TRUE(first->wait_for("re-formed with 1") && first->wait_for("world 2", 60, 4)) << first->err() << first->out();
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait(), 143);
}

// A scheduler takes one machine away: SIGTERM to its launcher, and to its workers as well.
TEST(Nodes, ANodeThatIsToldToGoLeavesTheOthersRunning) {
  const RendezvousSpot rendezvous;
  const std::string mark = new_mark();
  const std::vector<std::string> program = {"--join-window",
                                            "60",
                                            "--env",
                                            mark,
                                            "sh",
                                            "-c",
                                            "trap 'echo saved; exit 0' TERM; echo world $WORLD_SIZE restart "
                                            "$MANIPLE_RESTART_COUNT; while :; do sleep 0.05; done"};
  const auto first = rendezvous.node("1:2", 0, program);
  const auto second = rendezvous.node("1:2", 1, program);
  ASSERT_TRUE(first->wait_for("world 4", 60, 2) && second->wait_for("world 4", 60, 2)) << first->err() << second->err();
  second->signal(SIGTERM);
  EXPECT_EQ(second->wait(), 143) << second->err();
  EXPECT_EQ(second->count("saved"), 2) << second->out();
  EXPECT_NE(second->err().find("this node has left the job"), std::string::npos) << second->err();
  ASSERT_TRUE(first->wait_for("world 2 restart 0", 60, 2)) << first->out() << first->err();
  EXPECT_NE(first->err().find("leaves the job (SIGTERM to its launcher); the group is re-formed with 1"),
            std::string::npos)
      << first->err();
  std::string list;
  const std::string pid = fmt::format("\"pid\": {},", first->pid());
  const auto field = [&](const std::string& name, const std::string& value) {
    list = maniple({"ps", "--json"}).out;
    const auto own = list.find(pid);
    const std::string text = fmt::format("\"{}\": ", name);
    const auto found = own == std::string::npos ? own : list.find(text, own);
    return found != std::string::npos && list.compare(found + text.size(), value.size(), value) == 0;
  };
  EXPECT_TRUE(becomes_true([&] { return field("world_size", "2"); })) << list;
  EXPECT_TRUE(field("restarts", "0,")) << list;
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait(), 143) << first->err();
}

// Without enough others the job ends everywhere, and all are told why.
TEST(Nodes, WhoEndsTheJobIsSaid) {
  const RendezvousSpot rendezvous;
  const auto first = rendezvous.node("2", 0, {"sh", "-c", "echo up; exec sleep 1000"});
  const auto second = rendezvous.node("2", 1, {"sh", "-c", "echo up; exec sleep 1000"});
  ASSERT_TRUE(first->wait_for("] up", 60, 2) && second->wait_for("] up", 60, 2)) << first->err() << second->err();
  second->signal(SIGTERM);
  EXPECT_EQ(first->wait(), 143) << first->err();
  EXPECT_EQ(second->wait(), 143) << second->err();
  for (const auto* node : {&first, &second}) {
    EXPECT_NE((*node)->err().find("maniple: SIGTERM on host "), std::string::npos) << (*node)->err();
    EXPECT_NE((*node)->err().find(" ends the job on all nodes"), std::string::npos) << (*node)->err();
  }
}

TEST(Nodes, AnotherSecretIsRefused) {
  const RendezvousSpot rendezvous, other;
  const auto first = rendezvous.node("2", 0, {"--join-timeout", "3", "true"});
  Launched intruder({"run", "--nnodes", "2", "--node-rank", "1", "--master", rendezvous.place, "--secret-file",
                     other.secret, "--join-timeout", "20", "true"});
  EXPECT_EQ(intruder.wait(), 1);
  EXPECT_NE(intruder.err().find("secret"), std::string::npos) << intruder.err();
  EXPECT_EQ(first->wait(), 1);
}

TEST(Nodes, ATakenPortOfTheMasterIsNamed) {
  const RendezvousSpot rendezvous;
  // A listener that is not a launcher, and never answers.
  const UniqueFd holder = listen_on(Address::parse(rendezvous.place));
  for (const int rank : {0, -1}) {
    const auto node = rendezvous.node("2", rank, {"--join-timeout", "0.5", "true"});
    EXPECT_EQ(node->wait(), 2) << node->err();
    EXPECT_NE(node->err().find(fmt::format("by pid {} (", ::getpid())), std::string::npos) << node->err();
    EXPECT_NE(node->err().find("maniple: --master " + rendezvous.place), std::string::npos) << node->err();
    EXPECT_EQ(node->count("\n"), 1) << node->err();
  }
}

/// Runs what ssh would run, on this machine: stand_in HOST COMMAND.
std::string stand_in(const TemporaryDirectory& folder) {
  const std::string path = folder.path() + "/stand_in";
  std::ofstream(path)
      << "#!/bin/sh\necho \"$@\" >>" << folder.path()
      << "/calls\n[ \"$1\" = down ] && { echo 'cannot reach it' >&2; exit 255; }\nshift\nexec sh -c \"$*\"\n";
  ::chmod(path.c_str(), 0755);
  return path;
}

TEST(Hosts, AgentsAreStarted) {
  const TemporaryDirectory folder;
  // Both names are this machine, but not to the launcher.
  const Result result =
      maniple({"run", "--hosts", "127.0.0.2:2,127.0.0.3:1", "--rsh", stand_in(folder), "--env", "WORD=it's", "sh", "-c",
               "echo $RANK of $WORLD_SIZE on $NODE_RANK $WORD; exec \"$0\" join", worker_program()});
  EXPECT_EQ(result.code, 0) << result.err;
  for (const char* line : {"[rank 0] 0 of 3 on 0 it's\n", "[rank 1] 1 of 3 on 0 it's\n", "[rank 2] 2 of 3 on 1 it's\n",
                           "[rank 2] sum 3 of 3"}) {
    EXPECT_NE(result.out.find(line), std::string::npos) << line << result.out << result.err;
  }
  std::ifstream calls(folder.path() + "/calls");
  const std::string text{std::istreambuf_iterator<char>(calls), {}};
  EXPECT_NE(text.find("127.0.0.3 exec '"), std::string::npos) << text;
}

// The launcher speaks of it, not each host.
TEST(Hosts, AnUnknownVariableIsSpokenOfOnce) {
  const TemporaryDirectory folder;
  const Result result =
      maniple({"run", "--hosts", "127.0.0.2:2,127.0.0.3:1", "--rsh", stand_in(folder), worker_program(), "join"},
              {.env = {{"MANIPLE_HEARTBEATS", "1"}}});
  EXPECT_EQ(result.code, 0) << result.err;
  const std::string text = "MANIPLE_HEARTBEATS is not known";
  ASSERT_NE(result.err.find(text), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find(text), result.err.rfind(text)) << result.err;
}

TEST(Hosts, AFailureThereIsShownOnce) {
  const TemporaryDirectory folder;
  const std::string mark = new_mark();
  const Result result = maniple({"run", "--hosts", "localhost:1,127.0.0.3:2", "--rsh", stand_in(folder), "--env", mark,
                                 "sh", "-c", "[ $RANK = 2 ] && exit 4; sleep 1000"});
  EXPECT_EQ(result.code, 4) << result.err;
  EXPECT_NE(result.err.find("rank 2 of 3 failed first, on host 127.0.0.3"), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("failed first", result.err.find("failed first") + 1), std::string::npos) << result.err;
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

TEST(Hosts, AHostThatCannotBeReached) {
  const TemporaryDirectory folder;
  std::ofstream(folder.path() + "/hosts") << "127.0.0.2 slots=1\n";
  const std::string path = folder.path() + "/refuse";
  std::ofstream(path) << "#!/bin/sh\necho 'cannot reach it' >&2\nexit 255\n";
  ::chmod(path.c_str(), 0755);
  const Result result = maniple({"run", "--hostfile", folder.path() + "/hosts", "--rsh", path, "true"});
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_NE(
      result.err.find("host 127.0.0.2: its agent could not be started: the remote shell ended with exit code 255"),
      std::string::npos)
      << result.err;
}

TEST(Hosts, AnAgentThatWasKilledIsStartedAgain) {
  const TemporaryDirectory folder;
  const std::string mark = new_mark();
  const auto equals = mark.find('=');
  Launched launched({"run", "--hosts", "127.0.0.2:1,127.0.0.3:1", "--rsh", stand_in(folder), "--max-restarts", "2",
                     "--restart-delay", "0.05", "sh", "-c", "echo up $MANIPLE_RESTART_COUNT; exec sleep 1000"},
                    {.env = {{mark.substr(0, equals), mark.substr(equals + 1)}}});
  ASSERT_TRUE(launched.wait_for("up 0", 60, 2)) << launched.err();
  const pid_t agent = agent_of(mark, "1");
  ASSERT_GT(agent, 0);
  ::kill(agent, SIGKILL);
  ASSERT_TRUE(launched.wait_for("up 1", 60, 2)) << launched.out() << launched.err();
  EXPECT_NE(launched.err().find("maniple: host 127.0.0.3: its agent is started again"), std::string::npos)
      << launched.err();
  launched.signal(SIGTERM);
  EXPECT_EQ(launched.wait(), 143) << launched.err();
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));
}

// A host that cannot be reached for a while is tried again; the advice at the end is about hosts.
TEST(Hosts, AnAgentThatCannotBeStartedAgainIsTriedUntilTheTimeIsOver) {
  const TemporaryDirectory folder;
  const std::string mark = new_mark(), down = folder.path() + "/down", path = folder.path() + "/shell";
  const auto equals = mark.find('=');
  std::ofstream(path) << "#!/bin/sh\n[ -e " << down
                      << " ] && { echo 'no route' >&2; exit 255; }\nshift\nexec sh -c \"$*\"\n";
  ::chmod(path.c_str(), 0755);
  for (const bool back : {true, false}) {
    ::unlink(down.c_str());
    Launched launched(
        {"run", "--hosts", "127.0.0.2:1", "--rsh", path, "--max-restarts", "2", "--restart-delay", "0.05",
         "--join-timeout", back ? "60" : "3", "sh", "-c", "echo up $MANIPLE_RESTART_COUNT; exec sleep 1000"},
        {.env = {{mark.substr(0, equals), mark.substr(equals + 1)}}});
    ASSERT_TRUE(launched.wait_for("up 0")) << launched.err();
    std::ofstream(down) << "down";
    ::kill(agent_of(mark, "0"), SIGKILL);
    ASSERT_TRUE(launched.wait_for("the remote shell ended with exit code 255; trying again")) << launched.err();
    if (back) {
      ::unlink(down.c_str());
      ASSERT_TRUE(launched.wait_for("up 1")) << launched.err();
      launched.signal(SIGTERM);
      EXPECT_EQ(launched.wait(), 143) << launched.err();
    } else {
      EXPECT_EQ(launched.wait(), 1) << launched.err();
      EXPECT_NE(launched.err().find("maniple doctor --hosts"), std::string::npos) << launched.err();
      EXPECT_EQ(launched.count("trying again"), 1) << launched.err();
    }
  }
}

TEST(Hosts, TheLauncherIsKilled) {
  const TemporaryDirectory folder;
  const std::string mark = new_mark();
  Launched launched({"run", "--hosts", "127.0.0.2:1,127.0.0.3:1", "--rsh", stand_in(folder), "--env", mark, "sh", "-c",
                     "echo up; setsid sleep 1000 & sleep 1000"});
  ASSERT_TRUE(launched.wait_for("[rank 0] up") && launched.wait_for("[rank 1] up")) << launched.err();
  launched.signal(SIGKILL);
  EXPECT_EQ(launched.wait(), 137);
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }, 20));
}

}  // namespace
}  // namespace maniple::launched
