// The coordinator's decisions, without processes: nodes and time are played by the test.
#include <gtest/gtest.h>

#include <csignal>
#include <map>

#include "launch/coordinate/coordinator.h"

namespace maniple::launch {
namespace {

using Kind = AgentMessage::Kind;

struct Stage {
  explicit Stage(CoordinatorOptions options, std::function<void()> start_agents = {})
      : coordinator(options,
                    {.send = [this](int node, const AgentMessage& message) { sent[node].push_back(message); },
                     .set_timer = [this](Coordinator::Timer clock, auto delay) { clocks[clock] = delay.count(); },
                     .stop_timer = [this](Coordinator::Timer clock) { clocks.erase(clock); },
                     .print = [this](const std::string& text) { said += text + "\n"; },
                     .start_agents = std::move(start_agents),
                     .done = [this](int code) { result = code; }}) {
    coordinator.begin();
  }

  void join(int node, int rank = -1, int processes = 2) {
    AgentMessage message{
        .kind = Kind::join, .node_rank = rank, .processes = processes, .host = "host" + std::to_string(node)};
    coordinator.joined(node, message);
  }
  void report(int node, Kind kind, int generation, RankExit exit = {}) {
    coordinator.received(node,
                         {.kind = kind, .generation = generation, .port = 99, .host = "h", .exit = std::move(exit)});
  }
  void expire(Coordinator::Timer clock) {
    ASSERT_EQ(clocks.count(clock), 1u) << "the timer is not set";
    clocks.erase(clock);
    coordinator.on_timer(clock);
  }
  /// The last message to a node.
  AgentMessage last(int node) { return sent[node].empty() ? AgentMessage{} : sent[node].back(); }

  std::map<int, std::vector<AgentMessage>> sent;
  std::map<Coordinator::Timer, double> clocks;
  std::string said;
  std::optional<int> result;
  Coordinator coordinator;
};

TEST(Coordinator, RanksInTheOrderOfNodes) {
  Stage stage({.nodes = {3, 3}});
  stage.join(0, 0, 2);
  stage.join(7, 2, 1);
  EXPECT_EQ(stage.coordinator.state(), Coordinator::State::gathering);
  stage.join(5, 1, 4);
  EXPECT_EQ(stage.last(0).kind, Kind::reserve);
  stage.report(0, Kind::reserved, 0);
  EXPECT_EQ(stage.last(0).first_rank, 0);
  EXPECT_EQ(stage.last(5).first_rank, 2);
  EXPECT_EQ(stage.last(5).node_rank, 1);
  EXPECT_EQ(stage.last(7).first_rank, 6);
  EXPECT_EQ(stage.last(7).world_size, 7);
  EXPECT_EQ(stage.last(7).node_count, 3);
  for (const int node : {0, 5, 7}) stage.report(node, Kind::finished, 0);
  EXPECT_EQ(stage.result, 0);
}

TEST(Coordinator, NamesWhoIsMissing) {
  Stage stage({.nodes = {3, 3}});
  stage.join(0, 0);
  stage.join(1, 2);
  stage.expire(Coordinator::Timer::join_timeout);
  EXPECT_EQ(stage.result, 1);
  EXPECT_NE(stage.said.find("timed out after 300 s: 2 of 3 nodes joined; missing node rank 1"), std::string::npos)
      << stage.said;
}

TEST(Coordinator, RefusesWhatDoesNotFit) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 0);
  EXPECT_EQ(stage.last(1).kind, Kind::quit);
  EXPECT_NE(stage.last(1).text.find("node rank 0 is taken by host host0"), std::string::npos);
  stage.join(2, 5);
  EXPECT_NE(stage.last(2).text.find("expected 0 to 1"), std::string::npos);
  stage.join(3, 1);
  stage.join(4);
  EXPECT_NE(stage.last(4).text.find("has all of its 2 nodes"), std::string::npos);
  EXPECT_EQ(stage.coordinator.node_count(), 2u);
}

void start(Stage& stage, int generation) { stage.report(0, Kind::reserved, generation); }

TEST(Coordinator, FirstCauseEndsAll) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  start(stage, 0);
  stage.report(1, Kind::failed, 0, {.rank = 2, .code = 1, .error = "rank 0 is lost", .consequence = true});
  EXPECT_GT(stage.clocks[Coordinator::Timer::verdict], 0.1) << "it reports another as lost, whose exit may follow";
  stage.report(0, Kind::failed, 0, {.rank = 0, .signal = SIGKILL});
  stage.expire(Coordinator::Timer::verdict);
  EXPECT_NE(stage.said.find("rank 0 of 4 failed first"), std::string::npos) << stage.said;
  EXPECT_EQ(stage.last(1).kind, Kind::stop);
  EXPECT_EQ(stage.last(1).signal, SIGTERM);
  stage.report(0, Kind::stopped, 0);
  EXPECT_FALSE(stage.result.has_value());
  stage.report(1, Kind::stopped, 0);
  EXPECT_EQ(stage.result, 137);
}

TEST(Coordinator, RestartsWithLongerPauses) {
  Stage stage({.nodes = {1, 1}, .restarts = {.max_restarts = 2}});
  stage.join(0, 0);
  for (int generation = 0; generation < 3; ++generation) {
    start(stage, generation);
    EXPECT_EQ(stage.last(0).generation, generation);
    stage.report(0, Kind::failed, generation, {.rank = 1, .code = 9});
    stage.report(0, Kind::failed, generation - 1, {.rank = 0, .code = 8});  // of a time gone by
    stage.expire(Coordinator::Timer::verdict);
    stage.report(0, Kind::stopped, generation);
    if (generation == 2) break;
    EXPECT_DOUBLE_EQ(stage.clocks[Coordinator::Timer::restart], generation + 1);
    stage.expire(Coordinator::Timer::restart);
  }
  EXPECT_EQ(stage.result, 9);
}

TEST(Coordinator, MembershipChangesReFormWithoutCost) {
  Stage stage({.nodes = {1, 3}});
  stage.join(0, 0);
  stage.expire(Coordinator::Timer::join_window);
  start(stage, 0);
  EXPECT_EQ(stage.last(0).world_size, 2);
  stage.join(1);
  EXPECT_EQ(stage.last(0).kind, Kind::stop);
  stage.report(0, Kind::stopped, 0);
  start(stage, 1);
  EXPECT_EQ(stage.last(0).world_size, 4);
  EXPECT_EQ(stage.last(1).first_rank, 2);
  EXPECT_EQ(stage.last(1).generation, 1);
  stage.coordinator.lost(1, "gone");
  stage.report(0, Kind::stopped, 1);
  start(stage, 2);
  EXPECT_EQ(stage.last(0).world_size, 2);
  EXPECT_EQ(stage.coordinator.restarts(), 0) << "the group was re-formed, but nothing had failed";
  EXPECT_EQ(stage.last(0).restarts, 0);
  stage.report(0, Kind::finished, 2);
  EXPECT_EQ(stage.result, 0);
}

TEST(Coordinator, ANodeThatGetsSigtermLeavesIfEnoughRemain) {
  Stage stage({.nodes = {1, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  start(stage, 0);
  // Its workers got the signal as well; that is no failure.
  stage.report(1, Kind::failed, 0, {.rank = 2, .signal = SIGTERM});
  stage.coordinator.received(1, {.kind = Kind::interrupt, .signal = SIGTERM});
  EXPECT_NE(stage.said.find("host host1 leaves the job (SIGTERM to its launcher); the group is re-formed with 1"),
            std::string::npos)
      << stage.said;
  for (const int node : {0, 1}) EXPECT_EQ(stage.last(node).kind, Kind::stop);
  EXPECT_EQ(stage.last(0).grace_ms, 30'000) << "all may save";
  stage.report(1, Kind::stopped, 0);
  stage.report(0, Kind::stopped, 0);
  EXPECT_EQ(stage.last(1).kind, Kind::quit);
  EXPECT_EQ(stage.last(1).code, 143);
  start(stage, 1);
  EXPECT_EQ(stage.last(0).world_size, 2);
  EXPECT_EQ(stage.coordinator.restarts(), 0);

  // The last one cannot go without the job.
  stage.coordinator.received(0, {.kind = Kind::interrupt, .signal = SIGTERM});
  stage.report(0, Kind::stopped, 1);
  EXPECT_EQ(stage.result, 143);
}

TEST(Coordinator, WhoEndsTheJobIsSaidOnAllNodes) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  start(stage, 0);
  stage.coordinator.received(1, {.kind = Kind::interrupt, .signal = SIGTERM});
  const std::string text = "maniple: SIGTERM on host host1 ends the job on all nodes";
  EXPECT_NE(stage.said.find(text), std::string::npos) << stage.said;
  EXPECT_TRUE(std::any_of(stage.sent[1].begin(), stage.sent[1].end(),
                          [&](const auto& message) { return message.text == text; }));
  EXPECT_EQ(stage.last(0).kind, Kind::stop);
}

// The rank that will not call init(), and those that wait for it, are reported in any order.
TEST(Coordinator, ARankThatExitsBeforeInitIsAFailure) {
  for (const bool absent_first : {true, false}) {
    Stage stage({.nodes = {2, 2}});
    stage.join(0, 0);
    stage.join(1, 1);
    start(stage, 0);
    const auto absent = [&] { stage.report(1, Kind::absent, 0, {.rank = 3, .pid = 7}); };
    if (absent_first) absent();
    EXPECT_EQ(stage.coordinator.state(), Coordinator::State::running);
    stage.report(0, Kind::waiting, 0, {.rank = 0});
    if (!absent_first) absent();
    EXPECT_NE(stage.said.find("rank 3 of 4 failed first, on host host1 (pid 7): exit code 0 before it called init(), "
                              "where rank 0 waits for it"),
              std::string::npos)
        << stage.said;
    for (const int node : {0, 1}) stage.report(node, Kind::stopped, 0);
    EXPECT_EQ(stage.result, 1);
  }
}

TEST(Coordinator, NodesLearnWhichRanksWereShownAsTheCause) {
  Stage stage({.nodes = {1, 1}});
  stage.join(0, 0);
  start(stage, 0);
  stage.report(0, Kind::failed, 0, {.rank = 0, .code = 1, .consequence = true, .blamed = 1});
  stage.expire(Coordinator::Timer::verdict);
  EXPECT_EQ(stage.last(0).kind, Kind::stop);
  EXPECT_EQ(stage.last(0).exit.rank, 0);
  EXPECT_EQ(stage.last(0).exit.blamed, 1);
}

// The others lost it: it is named as what it is, also when it ran on another node.
TEST(Coordinator, ARankThatEndsEarlyWithZeroIsNamed) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  start(stage, 0);
  stage.report(0, Kind::exited, 0, {.rank = 1, .pid = 6});
  stage.report(1, Kind::exited, 0, {.rank = 3, .pid = 7});
  stage.report(0, Kind::failed, 0, {.rank = 0, .pid = 9, .code = 1, .consequence = true, .blamed = 3});
  stage.expire(Coordinator::Timer::verdict);
  EXPECT_NE(stage.said.find("rank 3 of 4 ended early, on host host1 (pid 7): exit code 0, while other ranks waited for "
                            "it; rank 0 failed because of it, on host host0 (pid 9): exit code 1"),
            std::string::npos)
      << stage.said;
}

TEST(Coordinator, ALostNodeBelowTheLeastNumberIsAFailure) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  start(stage, 0);
  stage.coordinator.lost(1, "gone");
  stage.report(0, Kind::stopped, 0);
  EXPECT_EQ(stage.result, 1);
  EXPECT_NE(stage.said.find("node 1 (host host1) is lost: gone"), std::string::npos);
}

TEST(Coordinator, InterruptsOnceAndTwice) {
  Stage stage({.nodes = {1, 1}, .restarts = {.max_restarts = 5}});
  stage.join(0, 0);
  start(stage, 0);
  stage.coordinator.interrupt(SIGINT);
  EXPECT_EQ(stage.last(0).signal, SIGINT);
  EXPECT_EQ(stage.last(0).grace_ms, 30'000);
  stage.coordinator.interrupt(SIGINT);
  EXPECT_EQ(stage.last(0).signal, SIGKILL);
  stage.report(0, Kind::stopped, 0);
  EXPECT_EQ(stage.result, 130);
}

// Nothing was started yet, so there is nothing to wait for: neither a frozen agent nor its late answer.
TEST(Coordinator, AStopWhileThePortIsReservedEndsAtOnce) {
  Stage stage({.nodes = {2, 2}, .starts_agents = true, .restarts = {.max_restarts = 5}});
  stage.join(1, 0);
  stage.join(2, 1);
  ASSERT_EQ(stage.coordinator.state(), Coordinator::State::reserving);
  stage.coordinator.interrupt(SIGINT);
  EXPECT_EQ(stage.result, 130);
  for (const int node : {1, 2}) EXPECT_EQ(stage.last(node).kind, Kind::quit);
  start(stage, 0);
  EXPECT_EQ(stage.last(1).kind, Kind::quit) << "the late answer starts nothing";
}

// The same after a generation has run: `stopped` of that one must not be needed again.
TEST(Coordinator, AStopWhileThePortOfALaterGenerationIsReservedEndsAtOnce) {
  Stage stage({.nodes = {2, 2}, .starts_agents = true, .restarts = {.max_restarts = 5}});
  stage.join(1, 0);
  stage.join(2, 1);
  stage.report(1, Kind::reserved, 0);
  stage.report(2, Kind::failed, 0, {.rank = 2, .code = 1});
  stage.expire(Coordinator::Timer::verdict);
  for (const int node : {1, 2}) stage.report(node, Kind::stopped, 0);
  stage.expire(Coordinator::Timer::restart);
  ASSERT_EQ(stage.coordinator.state(), Coordinator::State::reserving);
  stage.coordinator.fail("maniple: nobody reads", 141);
  EXPECT_EQ(stage.result, 141);
}

TEST(Coordinator, ANodeLostWhileThePortIsReservedIsReplacedOrEndsTheJob) {
  for (const bool elastic : {true, false}) {
    Stage stage({.nodes = {elastic ? 1 : 2, 2}});
    stage.join(0, 0);
    stage.join(1, 1);
    ASSERT_EQ(stage.coordinator.state(), Coordinator::State::reserving);
    stage.coordinator.lost(1, "gone");
    EXPECT_NE(stage.said.find("node 1 (host host1) is lost: gone"), std::string::npos) << stage.said;
    if (!elastic) {
      EXPECT_EQ(stage.result, 1);
      continue;
    }
    EXPECT_EQ(stage.last(0).kind, Kind::reserve);
    EXPECT_EQ(stage.last(0).generation, 1);
    start(stage, 0);
    EXPECT_EQ(stage.last(0).kind, Kind::reserve) << "of the group that is no more";
    start(stage, 1);
    EXPECT_EQ(stage.last(0).world_size, 2);
  }
}

TEST(Coordinator, ANodeThatJoinsWhileThePortIsReservedIsInTheFirstGroup) {
  Stage stage({.nodes = {1, 2}});
  stage.join(0, 0);
  stage.expire(Coordinator::Timer::join_window);
  ASSERT_EQ(stage.coordinator.state(), Coordinator::State::reserving);
  stage.join(1);
  start(stage, 1);
  EXPECT_EQ(stage.last(0).world_size, 4);
  EXPECT_EQ(stage.last(1).node_rank, 1);
}

TEST(Coordinator, ASecondLossWhileStoppingIsSaidAndCounts) {
  for (const int max_restarts : {0, 1}) {
    Stage stage({.nodes = {2, 3}, .restarts = {.max_restarts = max_restarts}});
    for (const int node : {0, 1, 2}) stage.join(node, node);
    start(stage, 0);
    stage.coordinator.lost(1, "gone");
    EXPECT_NE(stage.said.find("re-formed with 2"), std::string::npos) << stage.said;
    stage.coordinator.lost(2, "gone, too");
    EXPECT_NE(stage.said.find("node 2 (host host2) is lost: gone, too; nodes left: 1, --nnodes needs 2 or more"),
              std::string::npos)
        << stage.said;
    stage.report(0, Kind::stopped, 0);
    if (max_restarts == 0) {
      EXPECT_EQ(stage.result, 1);
      continue;
    }
    stage.expire(Coordinator::Timer::restart);
    ASSERT_EQ(stage.coordinator.state(), Coordinator::State::gathering);
    stage.expire(Coordinator::Timer::reminder);
    EXPECT_NE(stage.said.find("waiting: 1 of 2 nodes joined; missing node rank 1"), std::string::npos) << stage.said;
    stage.expire(Coordinator::Timer::join_timeout);
    EXPECT_EQ(stage.result, 1);
  }
}

// A node that has stopped already, or has joined meanwhile, counts for the next group; one that leaves does not.
TEST(Coordinator, LossesWhileStoppingCountWhoStays) {
  Stage stage({.nodes = {2, 3}});
  for (const int node : {0, 1}) stage.join(node);
  stage.expire(Coordinator::Timer::join_window);
  start(stage, 0);
  stage.join(2);
  ASSERT_EQ(stage.coordinator.state(), Coordinator::State::stopping);
  stage.report(1, Kind::stopped, 0);
  stage.coordinator.lost(1, "gone");
  EXPECT_FALSE(stage.result.has_value());
  stage.coordinator.lost(2, "gone");
  stage.report(0, Kind::stopped, 0);
  EXPECT_EQ(stage.result, 1) << stage.said;

  Stage leaves({.nodes = {2, 3}});
  for (const int node : {0, 1, 2}) leaves.join(node);
  start(leaves, 0);
  leaves.coordinator.received(2, {.kind = Kind::interrupt, .signal = SIGTERM});
  leaves.coordinator.lost(1, "gone");
  for (const int node : {0, 2}) leaves.report(node, Kind::stopped, 0);
  EXPECT_EQ(leaves.result, 1) << leaves.said;
}

TEST(Coordinator, AnAgentLostWhileOthersAreAwaitedIsStartedAgain) {
  int started = 0;
  Stage stage({.nodes = {2, 2}, .starts_agents = true}, [&] { ++started; });
  stage.join(1, 0);
  stage.coordinator.lost(1, "gone");
  EXPECT_EQ(started, 1);
  stage.expire(Coordinator::Timer::reminder);
  EXPECT_NE(stage.said.find("0 of 2 nodes joined; lost: host host1"), std::string::npos) << stage.said;
  stage.expire(Coordinator::Timer::join_timeout);
  EXPECT_EQ(stage.result, 1);
}

// What has finished does not run again because somebody joins.
TEST(Coordinator, ANodeThatJoinsAfterAnotherHasFinishedIsRefused) {
  for (const bool whole_node : {true, false}) {
    Stage stage({.nodes = {2, 3}});
    for (const int node : {0, 1}) stage.join(node);
    stage.expire(Coordinator::Timer::join_window);
    start(stage, 0);
    stage.report(1, whole_node ? Kind::finished : Kind::exited, 0, {.rank = 3});
    stage.join(2);
    EXPECT_EQ(stage.last(2).kind, Kind::quit);
    EXPECT_EQ(stage.last(2).code, 1);
    const std::string who = whole_node ? "node 1 (host host1)" : "rank 3 (host host1)";
    EXPECT_NE(stage.last(2).text.find(who + " has finished already"), std::string::npos) << stage.last(2).text;
    EXPECT_EQ(stage.coordinator.state(), Coordinator::State::running);
    if (!whole_node) stage.report(1, Kind::finished, 0);
    stage.report(0, Kind::finished, 0);
    EXPECT_EQ(stage.result, 0);
  }
}

// Its work is done: neither its loss nor its leave costs anything.
TEST(Coordinator, AFinishedNodeIsNotNeeded) {
  for (const bool leaves : {true, false}) {
    Stage stage({.nodes = {1, 2}});
    for (const int node : {0, 1}) stage.join(node, node);
    start(stage, 0);
    stage.report(1, Kind::finished, 0);
    if (leaves) {
      stage.coordinator.received(1, {.kind = Kind::interrupt, .signal = SIGTERM});
      EXPECT_EQ(stage.last(1).kind, Kind::quit);
    } else {
      stage.coordinator.lost(1, "gone");
    }
    EXPECT_EQ(stage.coordinator.state(), Coordinator::State::running) << stage.said;
    stage.report(0, Kind::finished, 0);
    EXPECT_EQ(stage.result, 0);
  }
}

TEST(Coordinator, APortThatCannotBeHadIsTheUsersMistake) {
  Stage stage({.nodes = {1, 1}, .restarts = {.max_restarts = 5}});
  stage.join(0, 0);
  stage.coordinator.received(0, {.kind = Kind::reserved, .text = "maniple: it is taken"});
  EXPECT_EQ(stage.result, 2);
  EXPECT_EQ(stage.said, "maniple: it is taken\n");
}

TEST(Coordinator, NodesOfOneMachineShareItsCores) {
  Stage stage({.nodes = {3, 3}});
  const auto join = [&](int node, int processes, const char* place) {
    stage.coordinator.joined(
        node, {.kind = Kind::join, .node_rank = node, .processes = processes, .host = "h", .text = place});
  };
  join(0, 2, "boot 0-7");
  join(1, 4, "other 0-7");
  join(2, 3, "boot 0-7");
  start(stage, 0);
  EXPECT_EQ(std::pair(stage.last(0).core_first, stage.last(0).core_total), std::pair(0, 5));
  EXPECT_EQ(std::pair(stage.last(1).core_first, stage.last(1).core_total), std::pair(0, 4));
  EXPECT_EQ(std::pair(stage.last(2).core_first, stage.last(2).core_total), std::pair(2, 5));
}

TEST(Coordinator, ASuspendedNodeSuspendsAll) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  start(stage, 0);
  stage.coordinator.received(1, {.kind = Kind::signal, .signal = SIGSTOP, .host = "host1"});
  for (const int node : {0, 1}) {
    EXPECT_EQ(stage.last(node).kind, Kind::signal);
    EXPECT_EQ(stage.last(node).signal, SIGSTOP);
  }
  EXPECT_NE(stage.last(0).text.find("suspended on host host1"), std::string::npos);
  EXPECT_EQ(stage.last(1).text, "") << "its user knows";
}

}  // namespace
}  // namespace maniple::launch
