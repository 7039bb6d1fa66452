// The coordinator while nodes come, leave and are lost.
#include <gtest/gtest.h>

#include <csignal>

#include "launch/coordinator_stage.h"

namespace maniple::launch {
namespace {

TEST(Coordinator, MembershipChangesReFormWithoutCost) {
  Stage stage({.nodes = {1, 3}});
  stage.join(0, 0);
  stage.wait();
  stage.reserved(0);
  EXPECT_EQ(stage.started(0).world_size, 2);
  stage.join(1);
  stage.last<message::Stop>(0);
  stage.stopped(0, 0);
  stage.reserved(1);
  EXPECT_EQ(stage.started(0).world_size, 4);
  EXPECT_EQ(stage.started(1).first_rank, 2);
  EXPECT_EQ(stage.started(1).generation, 1);
  stage.lost(1, "gone");
  stage.stopped(0, 1);
  stage.reserved(2);
  EXPECT_EQ(stage.started(0).world_size, 2);
  EXPECT_EQ(stage.coordinator.restarts(), 0) << "the group was re-formed, but nothing had failed";
  EXPECT_EQ(stage.started(0).restarts, 0);
  stage.finished(0, 2);
  EXPECT_EQ(stage.result, 0);
}

TEST(Coordinator, TheJoinTimeoutStartsAJobThatHasEnoughNodes) {
  Stage stage({.nodes = {2, 4}, .join_timeout = std::chrono::seconds(5), .join_window = std::chrono::seconds(60)});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.wait(5);
  stage.reserved(0);
  EXPECT_EQ(stage.started(0).world_size, 4);
}

TEST(Coordinator, ASignalToANodeThatHasLeftDoesNotEndTheJob) {
  Stage stage({.nodes = {1, 3}});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.receive(1, message::Interrupt{SIGTERM});
  EXPECT_EQ(stage.last<message::Quit>(1).code, 143);
  stage.receive(1, message::Interrupt{SIGTERM});
  EXPECT_FALSE(stage.result.has_value()) << stage.said;
  stage.wait();
  stage.reserved(0);
  EXPECT_EQ(stage.started(0).world_size, 2);
}

TEST(Coordinator, ANodeThatGetsSigtermLeavesIfEnoughRemain) {
  Stage stage({.nodes = {1, 2}});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.reserved(0);
  // Its workers got the signal as well; that is not a failure.
  stage.failed(1, 0, {.rank = 2, .signal = SIGTERM});
  stage.receive(1, message::Interrupt{SIGTERM});
  EXPECT_NE(stage.said.find("host host1 leaves the job (SIGTERM to its launcher); the group is re-formed with 1"),
            std::string::npos)
      << stage.said;
  for (const int node : {0, 1}) stage.last<message::Stop>(node);
  EXPECT_EQ(stage.last<message::Stop>(0).grace_ms, 30'000) << "all may save";
  stage.stopped(1, 0);
  stage.stopped(0, 0);
  stage.last<message::Quit>(1);
  EXPECT_EQ(stage.last<message::Quit>(1).code, 143);
  stage.reserved(1);
  EXPECT_EQ(stage.started(0).world_size, 2);
  EXPECT_EQ(stage.coordinator.restarts(), 0);

  // The last one cannot go without the job.
  stage.receive(0, message::Interrupt{SIGTERM});
  stage.stopped(0, 1);
  EXPECT_EQ(stage.result, 143);
}

TEST(Coordinator, ANodeLostWhileThePortIsReservedIsReplacedOrEndsTheJob) {
  for (const bool elastic : {true, false}) {
    Stage stage({.nodes = {elastic ? 1 : 2, 2}});
    stage.join(0, 0);
    stage.join(1, 1);
    ASSERT_EQ(stage.coordinator.state(), Coordinator::State::reserving);
    stage.lost(1, "gone");
    EXPECT_NE(stage.said.find("node 1 (host host1) is lost: gone"), std::string::npos) << stage.said;
    if (!elastic) {
      EXPECT_EQ(stage.result, 1);
      continue;
    }
    stage.last<message::Reserve>(0);
    EXPECT_EQ(stage.last<message::Reserve>(0).generation, 1);
    stage.reserved(0);
    stage.last<message::Reserve>(0);  // of the group that is no more
    stage.reserved(1);
    EXPECT_EQ(stage.started(0).world_size, 2);
  }
}

TEST(Coordinator, ANodeThatJoinsWhileThePortIsReservedIsInTheFirstGroup) {
  Stage stage({.nodes = {1, 2}});
  stage.join(0, 0);
  stage.wait();
  ASSERT_EQ(stage.coordinator.state(), Coordinator::State::reserving);
  stage.join(1);
  stage.reserved(1);
  EXPECT_EQ(stage.started(0).world_size, 4);
  EXPECT_EQ(stage.started(1).node_rank, 1);
}

TEST(Coordinator, ASecondLossWhileStoppingIsSaidAndCounts) {
  for (const int max_restarts : {0, 1}) {
    Stage stage({.nodes = {2, 3}, .restarts = {.max_restarts = max_restarts}});
    for (const int node : {0, 1, 2}) stage.join(node, node);
    stage.reserved(0);
    stage.lost(1, "gone");
    EXPECT_NE(stage.said.find("re-formed with 2"), std::string::npos) << stage.said;
    stage.lost(2, "gone, too");
    EXPECT_NE(stage.said.find("node 2 (host host2) is lost: gone, too; nodes left: 1, --nnodes needs 2 or more"),
              std::string::npos)
        << stage.said;
    stage.stopped(0, 0);
    if (max_restarts == 0) {
      EXPECT_EQ(stage.result, 1);
      continue;
    }
    stage.wait();
    ASSERT_EQ(stage.coordinator.state(), Coordinator::State::gathering);
    stage.wait(5);
    EXPECT_NE(stage.said.find("waiting: 1 of 2 nodes joined; missing node rank 1"), std::string::npos) << stage.said;
    stage.wait(300);
    EXPECT_EQ(stage.result, 1);
  }
}

// A node that has stopped already, or has joined meanwhile, counts for the next group; one that leaves does not.
TEST(Coordinator, LossesWhileStoppingCountWhoStays) {
  Stage stage({.nodes = {2, 3}});
  for (const int node : {0, 1}) stage.join(node);
  stage.wait();
  stage.reserved(0);
  stage.join(2);
  ASSERT_EQ(stage.coordinator.state(), Coordinator::State::stopping);
  stage.stopped(1, 0);
  stage.lost(1, "gone");
  EXPECT_FALSE(stage.result.has_value());
  stage.lost(2, "gone");
  stage.stopped(0, 0);
  EXPECT_EQ(stage.result, 1) << stage.said;

  Stage leaves({.nodes = {2, 3}});
  for (const int node : {0, 1, 2}) leaves.join(node);
  leaves.reserved(0);
  leaves.receive(2, message::Interrupt{SIGTERM});
  leaves.lost(1, "gone");
  for (const int node : {0, 2}) leaves.stopped(node, 0);
  EXPECT_EQ(leaves.result, 1) << leaves.said;
}

TEST(Coordinator, AnAgentLostWhileOthersAreAwaitedIsStartedAgain) {
  Stage stage({.nodes = {2, 2}, .starts_agents = true});
  stage.join(1, 0);
  stage.lost(1, "gone");
  EXPECT_EQ(stage.agents_started, 1);
  stage.wait(5);
  EXPECT_NE(stage.said.find("0 of 2 nodes joined; lost: host host1"), std::string::npos) << stage.said;
  stage.wait(300);
  EXPECT_EQ(stage.result, 1);
}

// What has finished does not run again because somebody joins.
TEST(Coordinator, ANodeThatJoinsAfterAnotherHasFinishedIsRefused) {
  for (const bool whole_node : {true, false}) {
    Stage stage({.nodes = {2, 3}});
    for (const int node : {0, 1}) stage.join(node);
    stage.wait();
    stage.reserved(0);
    if (whole_node) stage.finished(1, 0);
    if (!whole_node) stage.receive(1, message::Exited{0, {.rank = 3}});
    stage.join(2);
    stage.last<message::Quit>(2);
    EXPECT_EQ(stage.last<message::Quit>(2).code, 1);
    const std::string who = whole_node ? "node 1 (host host1)" : "rank 3 (host host1)";
    EXPECT_NE(stage.last<message::Quit>(2).text.find(who + " has finished already"), std::string::npos)
        << stage.last<message::Quit>(2).text;
    EXPECT_EQ(stage.coordinator.state(), Coordinator::State::running);
    if (!whole_node) stage.finished(1, 0);
    stage.finished(0, 0);
    EXPECT_EQ(stage.result, 0);
  }
}

// Its work is done: neither its loss nor its leave costs anything.
TEST(Coordinator, AFinishedNodeIsNotNeeded) {
  for (const bool leaves : {true, false}) {
    Stage stage({.nodes = {1, 2}});
    for (const int node : {0, 1}) stage.join(node, node);
    stage.reserved(0);
    stage.finished(1, 0);
    if (leaves) {
      stage.receive(1, message::Interrupt{SIGTERM});
      stage.last<message::Quit>(1);
    } else {
      stage.lost(1, "gone");
    }
    EXPECT_EQ(stage.coordinator.state(), Coordinator::State::running) << stage.said;
    stage.finished(0, 0);
    EXPECT_EQ(stage.result, 0);
  }
}

}  // namespace
}  // namespace maniple::launch
