// The coordinator's decisions, without processes: nodes and time are played by the test.
#include <gtest/gtest.h>

#include <csignal>

#include "launch/coordinator_stage.h"

namespace maniple::launch {
namespace {

TEST(Coordinator, RanksInTheOrderOfNodes) {
  Stage stage({.nodes = {3, 3}});
  stage.join(0, 0, 2);
  stage.join(7, 2, 1);
  EXPECT_EQ(stage.coordinator.state(), Coordinator::State::gathering);
  stage.join(5, 1, 4);
  stage.last<message::Reserve>(0);
  stage.reserved(0);
  EXPECT_EQ(stage.started(0).first_rank, 0);
  EXPECT_EQ(stage.started(5).first_rank, 2);
  EXPECT_EQ(stage.started(5).node_rank, 1);
  EXPECT_EQ(stage.started(7).first_rank, 6);
  EXPECT_EQ(stage.started(7).world_size, 7);
  EXPECT_EQ(stage.started(7).node_count, 3);
  for (const int node : {0, 5, 7}) stage.finished(node, 0);
  EXPECT_EQ(stage.result, 0);
}

TEST(Coordinator, NamesWhoIsMissing) {
  Stage stage({.nodes = {3, 3}});
  stage.join(0, 0);
  stage.join(1, 2);
  stage.wait(300);
  EXPECT_EQ(stage.result, 1);
  EXPECT_NE(stage.said.find("timed out after 300 s: 2 of 3 nodes joined; missing node rank 1"), std::string::npos)
      << stage.said;
}

TEST(Coordinator, RefusesWhatDoesNotFit) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 0);
  stage.last<message::Quit>(1);
  EXPECT_NE(stage.last<message::Quit>(1).text.find("node rank 0 is taken by host host0"), std::string::npos);
  stage.join(2, 5);
  EXPECT_NE(stage.last<message::Quit>(2).text.find("expected 0 to 1"), std::string::npos);
  stage.join(3, 1);
  stage.join(4);
  EXPECT_NE(stage.last<message::Quit>(4).text.find("has all of its 2 nodes"), std::string::npos);
  EXPECT_EQ(stage.coordinator.node_count(), 2u);
}

TEST(Coordinator, FirstCauseEndsAll) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.reserved(0);
  stage.failed(1, 0, {.rank = 2, .code = 1, .error = "rank 0 is lost", .consequence = true});
  EXPECT_GT(stage.delay(), 0.1) << "it reports another as lost, whose exit may follow";
  stage.failed(0, 0, {.rank = 0, .signal = SIGKILL});
  stage.wait();
  EXPECT_NE(stage.said.find("rank 0 of 4 failed first"), std::string::npos) << stage.said;
  stage.last<message::Stop>(1);
  EXPECT_EQ(stage.last<message::Stop>(1).signal, SIGTERM);
  stage.stopped(0, 0);
  EXPECT_FALSE(stage.result.has_value());
  stage.stopped(1, 0);
  EXPECT_EQ(stage.result, 137);
}

TEST(Coordinator, RestartsWithLongerPauses) {
  Stage stage({.nodes = {1, 1}, .restarts = {.max_restarts = 2}});
  stage.join(0, 0);
  for (int generation = 0; generation < 3; ++generation) {
    stage.reserved(generation);
    EXPECT_EQ(stage.started(0).generation, generation);
    stage.failed(0, generation, {.rank = 1, .code = 9});
    stage.failed(0, generation - 1, {.rank = 0, .code = 8});  // of a time gone by
    stage.wait();
    stage.stopped(0, generation);
    if (generation == 2) break;
    EXPECT_DOUBLE_EQ(stage.delay(), generation + 1);
    stage.wait();
  }
  EXPECT_EQ(stage.result, 9);
}

TEST(Coordinator, WhoEndsTheJobIsSaidOnAllNodes) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.reserved(0);
  stage.receive(1, message::Interrupt{SIGTERM});
  const std::string text = "maniple: SIGTERM on host host1 ends the job on all nodes";
  EXPECT_NE(stage.said.find(text), std::string::npos) << stage.said;
  EXPECT_TRUE(std::any_of(stage.sent[1].begin(), stage.sent[1].end(),
                          [&](const auto& message) { return message == AgentMessage(message::Verdict{text}); }));
  stage.last<message::Stop>(0);
}

// The rank that will not call init(), and those that wait for it, are reported in any order.
TEST(Coordinator, ARankThatExitsBeforeInitIsAFailure) {
  for (const bool absent_first : {true, false}) {
    Stage stage({.nodes = {2, 2}});
    stage.join(0, 0);
    stage.join(1, 1);
    stage.reserved(0);
    const auto absent = [&] { stage.receive(1, message::Absent{0, {.rank = 3, .pid = 7}}); };
    if (absent_first) absent();
    EXPECT_EQ(stage.coordinator.state(), Coordinator::State::running);
    stage.receive(0, message::Waiting{0, 0});
    if (!absent_first) absent();
    EXPECT_NE(stage.said.find("rank 3 of 4 failed first, on host host1 (pid 7): exit code 0 before it called init(), "
                              "where rank 0 waits for it"),
              std::string::npos)
        << stage.said;
    for (const int node : {0, 1}) stage.stopped(node, 0);
    EXPECT_EQ(stage.result, 1);
  }
}

TEST(Coordinator, NodesLearnWhichRanksWereShownAsTheCause) {
  Stage stage({.nodes = {1, 1}});
  stage.join(0, 0);
  stage.reserved(0);
  stage.failed(0, 0, {.rank = 0, .code = 1, .consequence = true, .blamed = 1});
  stage.wait();
  stage.last<message::Stop>(0);
  EXPECT_EQ(stage.last<message::Stop>(0).reported, (std::vector<int>{0, 1}));
}

// The others lost it: it is named as what it is, also when it ran on another node.
TEST(Coordinator, ARankThatEndsEarlyWithZeroIsNamed) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.reserved(0);
  stage.receive(0, message::Exited{0, {.rank = 1, .pid = 6}});
  stage.receive(1, message::Exited{0, {.rank = 3, .pid = 7}});
  stage.failed(0, 0, {.rank = 0, .pid = 9, .code = 1, .consequence = true, .blamed = 3});
  stage.wait();
  EXPECT_NE(stage.said.find("rank 3 of 4 ended early, on host host1 (pid 7): exit code 0, while other ranks waited for "
                            "it; rank 0 failed because of it, on host host0 (pid 9): exit code 1"),
            std::string::npos)
      << stage.said;
}

TEST(Coordinator, ALostNodeBelowTheLeastNumberIsAFailure) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.reserved(0);
  stage.lost(1, "gone");
  stage.stopped(0, 0);
  EXPECT_EQ(stage.result, 1);
  EXPECT_NE(stage.said.find("node 1 (host host1) is lost: gone"), std::string::npos);
}

TEST(Coordinator, InterruptsOnceAndTwice) {
  Stage stage({.nodes = {1, 1}, .restarts = {.max_restarts = 5}});
  stage.join(0, 0);
  stage.reserved(0);
  stage.interrupt(SIGINT);
  EXPECT_EQ(stage.last<message::Stop>(0).signal, SIGINT);
  EXPECT_EQ(stage.last<message::Stop>(0).grace_ms, 30'000);
  stage.interrupt(SIGINT);
  EXPECT_EQ(stage.last<message::Stop>(0).signal, SIGKILL);
  stage.stopped(0, 0);
  EXPECT_EQ(stage.result, 130);
}

// Nothing was started yet, so there is nothing to wait for: neither a frozen agent nor its late answer.
TEST(Coordinator, AStopWhileThePortIsReservedEndsAtOnce) {
  Stage stage({.nodes = {2, 2}, .starts_agents = true, .restarts = {.max_restarts = 5}});
  stage.join(1, 0);
  stage.join(2, 1);
  ASSERT_EQ(stage.coordinator.state(), Coordinator::State::reserving);
  stage.interrupt(SIGINT);
  EXPECT_EQ(stage.result, 130);
  for (const int node : {1, 2}) stage.last<message::Quit>(node);
  stage.reserved(0);
  stage.last<message::Quit>(1);  // the late answer starts nothing
}

// The same after a generation has run: `stopped` of that one must not be needed again.
TEST(Coordinator, AStopWhileThePortOfALaterGenerationIsReservedEndsAtOnce) {
  Stage stage({.nodes = {2, 2}, .starts_agents = true, .restarts = {.max_restarts = 5}});
  stage.join(1, 0);
  stage.join(2, 1);
  stage.reserved(0, 1);
  stage.failed(2, 0, {.rank = 2, .code = 1});
  stage.wait();
  for (const int node : {1, 2}) stage.stopped(node, 0);
  stage.wait();
  ASSERT_EQ(stage.coordinator.state(), Coordinator::State::reserving);
  stage.happened(event::Broken{"maniple: nobody reads", 141});
  EXPECT_EQ(stage.result, 141);
}

TEST(Coordinator, APortThatCannotBeHadIsTheUsersMistake) {
  Stage stage({.nodes = {1, 1}, .restarts = {.max_restarts = 5}});
  stage.join(0, 0);
  stage.receive(0, message::Reserved{.error = "maniple: it is taken"});
  EXPECT_EQ(stage.result, 2);
  EXPECT_EQ(stage.said, "maniple: it is taken\n");
}

TEST(Coordinator, NodesOfOneMachineShareItsCores) {
  Stage stage({.nodes = {3, 3}});
  const auto join = [&](int node, int processes, const char* place) {
    stage.happened(event::Joined{node, {.node_rank = node, .processes = processes, .host = "h", .core_set = place}});
  };
  join(0, 2, "boot 0-7");
  join(1, 4, "other 0-7");
  join(2, 3, "boot 0-7");
  stage.reserved(0);
  EXPECT_EQ(std::pair(stage.started(0).core_first, stage.started(0).core_total), std::pair(0, 5));
  EXPECT_EQ(std::pair(stage.started(1).core_first, stage.started(1).core_total), std::pair(0, 4));
  EXPECT_EQ(std::pair(stage.started(2).core_first, stage.started(2).core_total), std::pair(2, 5));
}

TEST(Coordinator, ASuspendedNodeSuspendsAll) {
  Stage stage({.nodes = {2, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.reserved(0);
  stage.receive(1, message::Signal{.signal = SIGSTOP, .host = "host1"});
  for (const int node : {0, 1}) {
    stage.last<message::Signal>(node);
    EXPECT_EQ(stage.last<message::Signal>(node).signal, SIGSTOP);
  }
  EXPECT_NE(stage.last<message::Signal>(0).text.find("suspended on host host1"), std::string::npos);
  EXPECT_EQ(stage.last<message::Signal>(1).text, "") << "its user knows";
}

}  // namespace
}  // namespace maniple::launch
