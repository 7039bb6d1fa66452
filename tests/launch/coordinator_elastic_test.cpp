// An elastic job on several nodes: workers and nodes come and go while the others train.
#include <gtest/gtest.h>

#include <csignal>

#include "launch/coordinator_stage.h"

namespace maniple::launch {
namespace {

struct NodesStage : Stage {
  explicit NodesStage(ElasticRange range = {2, 8}) : Stage({.nodes = {1, 4}, .elastic = range}) {}

  /// Nodes 0 and 1 with two workers each, which have met.
  void start() {
    join(0, 0);
    join(1, 1);
    wait();  // for more nodes
    reserved(0);
    for (int worker = 0; worker < 4; ++worker) notice(worker, WorkerNotice::Kind::ready);
    form(0);
    meet({0, 1, 2, 3});
  }
  void notice(int worker, WorkerNotice::Kind kind) {
    receive(worker / 2, message::Noticed{0, {.kind = kind, .rank = worker}});
  }
  void meet(const std::vector<int>& workers) {
    for (const int worker : workers) notice(worker, WorkerNotice::Kind::joined);
  }
  /// `node` was asked for a port and answers.
  void form(int node) {
    const message::Reserve asked = last<message::Reserve>(node);
    receive(node, message::Reserved{.generation = 0,
                                    .members_generation = asked.members_generation,
                                    .host = "host" + std::to_string(node),
                                    .port = 1234});
  }
  void exits(int worker, int code, int signal = 0) {
    const RankExit exit{.rank = worker, .pid = 100 + worker, .code = code, .signal = signal};
    if (exit.failed()) {
      failed(worker / 2, 0, exit);
    } else {
      receive(worker / 2, message::Exited{0, exit});
    }
  }
  bool was_stopped(int node) {
    for (const AgentMessage& message : sent[node]) {
      if (std::holds_alternative<message::Stop>(message)) return true;
    }
    return false;
  }
};

TEST(CoordinatorElastic, AGenerationIsPublishedOnAllNodes) {
  NodesStage stage;
  stage.start();
  for (const int node : {0, 1}) {
    const auto members = stage.last<message::Members>(node);
    EXPECT_EQ(members.members, std::vector<int>({0, 1, 2, 3}));
    EXPECT_EQ(members.host, "host0");
    EXPECT_EQ(members.port, 1234);
    EXPECT_EQ(members.members_generation, 1);
  }
}

TEST(CoordinatorElastic, AWorkerIsReplacedOnItsNode) {
  NodesStage stage;
  stage.start();
  stage.exits(2, 0, SIGKILL);
  stage.form(0);
  EXPECT_EQ(stage.last<message::Members>(0).members, std::vector<int>({0, 1, 3}));
  const auto& sent = stage.sent[1];
  ASSERT_GE(sent.size(), 2u);
  const auto* const replace = std::get_if<message::Replace>(&sent[sent.size() - 2]);
  ASSERT_NE(replace, nullptr);
  EXPECT_EQ(replace->worker, 2);
}

TEST(CoordinatorElastic, TheOtherNodesGoOnWithoutALostNode) {
  NodesStage stage;
  stage.start();
  stage.lost(1, "no heartbeat");
  stage.form(0);
  EXPECT_EQ(stage.last<message::Members>(0).members, std::vector<int>({0, 1}));
  EXPECT_NE(stage.said.find("node 1 (host host1) is lost: no heartbeat"), std::string::npos) << stage.said;
  EXPECT_FALSE(stage.was_stopped(0));
  EXPECT_EQ(stage.coordinator.world_size(), 2);
}

TEST(CoordinatorElastic, TheNodeOfTheNewRankZeroServesTheStore) {
  NodesStage stage({1, 8});
  stage.start();
  stage.exits(0, 0, SIGKILL);
  stage.form(0);
  stage.meet({1, 2, 3});
  stage.exits(1, 0, SIGKILL);
  stage.form(1);
  const auto members = stage.last<message::Members>(0);
  EXPECT_EQ(members.members, std::vector<int>({2, 3}));
  EXPECT_EQ(members.host, "host1");
}

TEST(CoordinatorElastic, APortOfAnOlderGenerationIsIgnored) {
  NodesStage stage({1, 8});
  stage.start();
  stage.exits(3, 0, SIGKILL);
  stage.exits(1, 0, SIGKILL);  // generation 3 replaces generation 2
  const std::size_t before = stage.sent[1].size();
  stage.receive(0, message::Reserved{.generation = 0, .members_generation = 2, .host = "host0", .port = 5});
  EXPECT_EQ(stage.sent[1].size(), before);
  stage.receive(0, message::Reserved{.generation = 0, .members_generation = 3, .host = "host0", .port = 6});
  EXPECT_EQ(stage.last<message::Members>(1).members, std::vector<int>({0, 2}));
}

TEST(CoordinatorElastic, ANodeMayJoinLater) {
  NodesStage stage({2, 5});
  stage.start();
  stage.join(2, -1, 3);
  const auto start = stage.started(2);
  EXPECT_EQ(start.first_rank, 4);
  EXPECT_EQ(start.processes, 1) << "--elastic 2:5";
  EXPECT_EQ(start.node_rank, 2);
  EXPECT_TRUE(start.joins_late);
  EXPECT_FALSE(stage.was_stopped(0));
  stage.receive(2, message::Noticed{0, {.kind = WorkerNotice::Kind::ready, .rank = 4}});
  stage.form(0);
  EXPECT_EQ(stage.last<message::Members>(2).members, std::vector<int>({0, 1, 2, 3, 4}));

  stage.join(3);
  EXPECT_NE(stage.last<message::Quit>(3).text.find("all of its 5 workers already"), std::string::npos);
}

TEST(CoordinatorElastic, ANodeThatCannotStartItsWorkersDoesNotHarmTheOthers) {
  NodesStage stage;
  stage.start();
  stage.join(2);
  stage.failed(2, 0, {.rank = 4, .pid = -1, .code = 127, .error = "no such program"});
  EXPECT_EQ(stage.last<message::Quit>(2).code, 127);
  EXPECT_NE(stage.said.find("no such program"), std::string::npos) << stage.said;
  EXPECT_FALSE(stage.was_stopped(0));
  EXPECT_EQ(stage.coordinator.world_size(), 4);
}

TEST(CoordinatorElastic, ANodeThatGetsSigtermLeaves) {
  NodesStage stage;
  stage.start();
  stage.receive(1, message::Interrupt{SIGTERM});
  const auto stop = stage.last<message::Stop>(1);
  EXPECT_TRUE(stop.leaves);
  EXPECT_FALSE(stage.was_stopped(0));
  stage.notice(2, WorkerNotice::Kind::leaving);
  stage.notice(3, WorkerNotice::Kind::leaving);
  stage.form(0);
  EXPECT_EQ(stage.last<message::Members>(0).members, std::vector<int>({0, 1}));
  stage.stopped(1, 0);
  EXPECT_EQ(stage.last<message::Quit>(1).code, 128 + SIGTERM);
  EXPECT_FALSE(stage.result);
}

TEST(CoordinatorElastic, ANodeThatTheJobNeedsEndsIt) {
  NodesStage stage({3, 8});
  stage.start();
  stage.receive(1, message::Interrupt{SIGTERM});
  EXPECT_TRUE(stage.was_stopped(0));
  EXPECT_FALSE(stage.last<message::Stop>(1).leaves);
}

TEST(CoordinatorElastic, WithTooFewWorkersTheSurvivorsMeetAndThenEnd) {
  NodesStage stage({3, 8});
  stage.start();
  stage.lost(1, "no heartbeat");
  EXPECT_NE(stage.said.find("2 of at least 3 workers are ready"), std::string::npos) << stage.said;
  EXPECT_EQ(stage.agents_started, 1);
  stage.wait(301);
  stage.form(0);
  const auto& sent = stage.sent[0];
  ASSERT_GE(sent.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<message::Members>(sent[sent.size() - 2]));
  EXPECT_FALSE(stage.last<message::Stop>(0).leaves);
  stage.stopped(0, 0);
  EXPECT_EQ(stage.result, 1);
}

TEST(CoordinatorElastic, TheJobEndsWhenAllWorkersHave) {
  NodesStage stage;
  stage.start();
  for (const int worker : {0, 1, 2}) stage.exits(worker, 0);
  EXPECT_FALSE(stage.result);
  stage.exits(3, 0);
  for (const int node : {0, 1}) {
    stage.last<message::Finish>(node);
    EXPECT_FALSE(stage.result);
    stage.finished(node, 0);
  }
  EXPECT_EQ(stage.result, 0);
}

TEST(CoordinatorElastic, IsResized) {
  NodesStage stage;
  stage.start();
  const auto resize = [&](int workers) {
    stage.answered.reset();
    stage.happened(event::Resize{workers});
    return stage.answered.value_or(effect::Answer{});
  };
  EXPECT_EQ(resize(4).text, "it has 4 workers already");
  EXPECT_NE(resize(1).text.find("--elastic 2:8 allows 2 to 8"), std::string::npos);
  EXPECT_FALSE(resize(9).accepted);
  const auto smaller = resize(3);
  EXPECT_TRUE(smaller.accepted);
  EXPECT_EQ(smaller.text, "from 4 to 3 workers");
  const auto asked = stage.last<message::Kill>(1);
  EXPECT_EQ(asked.worker, 3);
  EXPECT_EQ(asked.signal, SIGTERM);
  stage.exits(0, 0);
  EXPECT_EQ(resize(4).text, "its training is over");

  Stage other({.nodes = {1, 1}});
  other.happened(event::Resize{2});
  EXPECT_NE(other.answered->text.find("not started with --elastic"), std::string::npos);
}

TEST(CoordinatorElastic, AllNodesMustHaveTheSameRange) {
  NodesStage stage;
  stage.join(0, 0);
  stage.happened(event::Joined{
      1, {.processes = 2, .min_nodes = 1, .max_nodes = 4, .min_workers = 2, .max_workers = 6, .host = "host1"}});
  EXPECT_NE(stage.last<message::Quit>(1).text.find("--elastic is 2:6 there but 2:8 at the master"), std::string::npos);
  stage.happened(event::Joined{2, {.processes = 2, .min_nodes = 1, .max_nodes = 4, .host = "host2"}});
  EXPECT_NE(stage.last<message::Quit>(2).text.find("--elastic is not given there"), std::string::npos);
}

TEST(CoordinatorElastic, TooManyProcessesAreRefusedBeforeTheStart) {
  NodesStage stage({2, 3});
  stage.join(0, 0);
  stage.join(1, 1);
  stage.wait();
  EXPECT_EQ(stage.result, 2);
  EXPECT_NE(stage.said.find("--elastic is 2:3, and 2 nodes start 4 processes"), std::string::npos) << stage.said;
}

}  // namespace
}  // namespace maniple::launch
