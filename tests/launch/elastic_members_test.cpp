// Which workers of an elastic job form a generation.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "launch/elastic_stage.h"

namespace maniple::launch {
namespace {

using Job = ElasticStage;

TEST(ElasticMembers, TheFirstGenerationHasAllWorkers) {
  Job job(3);
  job.ready(2);
  job.ready(0);
  EXPECT_TRUE(job.formed.empty());
  job.ready(1);
  EXPECT_EQ(job.formed, std::vector<Members>({{0, 1, 2}}));
}

TEST(ElasticMembers, ALostMemberIsReplacedAndTheOthersGoOnAtOnce) {
  Job job(3);
  job.start();
  job.dies(0);
  EXPECT_EQ(job.formed.back(), Members({1, 2}));
  ASSERT_EQ(job.replaced.size(), 1u);
  EXPECT_EQ(job.replaced[0].worker, 0);
  EXPECT_TRUE(job.replaced[0].joins_late);
  job.ready(0);
  EXPECT_EQ(job.formed.back(), Members({1, 2})) << "the generation has not met yet";
  job.all_join();
  EXPECT_EQ(job.formed.back(), Members({1, 2, 0})) << "survivors come first: rank 0 has the state";
}

TEST(ElasticMembers, AWorkerThatDiesBeforeTheFirstGenerationIsPartOfIt) {
  Job job(2);
  job.ready(0);
  job.dies(1);
  ASSERT_EQ(job.replaced.size(), 1u);
  EXPECT_FALSE(job.replaced[0].joins_late);
  EXPECT_TRUE(job.formed.empty());
  job.ready(1);
  EXPECT_EQ(job.formed.back(), Members({0, 1}));
}

TEST(ElasticMembers, AMemberThatDiesWhileAGenerationFormsLeavesIt) {
  Job job(4);
  job.start();
  job.dies(3);
  job.joined(0);
  job.dies(2);
  EXPECT_EQ(job.formed.back(), Members({0, 1}));
}

TEST(ElasticMembers, ReplacementsOfAWorkerThatKeepsFailingAreDelayedAndEnd) {
  Job job(2);
  job.start();
  for (int failure = 1; failure < ElasticMembers::kMaxQuickFailures; ++failure) {
    job.dies(1);
    job.wait(40);
    EXPECT_EQ(job.replaced.size(), static_cast<std::size_t>(failure));
  }
  job.dies(1);
  job.wait(1000);
  EXPECT_EQ(job.replaced.size(), static_cast<std::size_t>(ElasticMembers::kMaxQuickFailures - 1));
  EXPECT_NE(job.text.find("it is not replaced"), std::string::npos) << job.text;
  EXPECT_FALSE(job.ended);
  job.dies(0);
  job.ready(0);
  EXPECT_EQ(job.formed.back(), Members({0}));
}

TEST(ElasticMembers, AnErrorOfAllWorkersThatComesAgainAndAgainEndsTheJob) {
  Job job(2);
  job.start();
  for (int time = 1; time <= ElasticMembers::kMaxErrorsOfAll; ++time) {
    EXPECT_FALSE(job.ended);
    job.wait(1000);
    job.fails(time % 2);
    job.fails(1 - time % 2);
    if (time < ElasticMembers::kMaxErrorsOfAll) job.start();
  }
  EXPECT_TRUE(job.ended);
  EXPECT_NE(job.text.find("all workers have ended with errors 5 times; the job ends"), std::string::npos) << job.text;
  EXPECT_EQ(job.replaced.size(), 2u * ElasticMembers::kMaxErrorsOfAll - 1) << "none after the end";
}

TEST(ElasticMembers, AJobWhoseWorkersAreAllKilledAgainAndAgainGoesOn) {
  Job job(2);
  job.start();
  for (int time = 1; time <= 20; ++time) {
    job.wait(1000);
    job.fails(1);
    job.dies(0);
    job.start();
  }
  EXPECT_FALSE(job.ended);
}

TEST(ElasticMembers, BelowTheMinimumTheJobWaitsAndThenEnds) {
  Job job(2, {2, 4});
  job.start();
  job.dies(1);
  EXPECT_EQ(job.formed.size(), 1u);
  EXPECT_NE(job.text.find("1 of at least 2 workers"), std::string::npos) << job.text;
  job.wait(299);
  EXPECT_FALSE(job.ended);
  job.wait(2);
  EXPECT_TRUE(job.ended);
  EXPECT_EQ(job.formed.back(), Members({0})) << "the survivor saves the state";
}

TEST(ElasticMembers, WithTooFewWorkersAndNoneToComeTheJobEndsAtOnce) {
  Job job(2, {2, 4});
  job.start();
  job.leaves(1);
  EXPECT_TRUE(job.ended);
  EXPECT_FALSE(job.finished);
  EXPECT_EQ(job.formed.back(), Members({0}));
}

TEST(ElasticMembers, AReplacementEndsTheWait) {
  Job job(2, {2, 4});
  job.start();
  job.dies(1);
  job.ready(1);
  EXPECT_EQ(job.formed.back(), Members({0, 1}));
  job.wait(1000);
  EXPECT_FALSE(job.ended);
}

TEST(ElasticMembers, AReplacementThatHangsBeforeInitIsReplacedUntilItIsGivenUp) {
  Job job(2);
  job.start();
  job.dies(1);
  job.all_join();
  for (int start = 1; start < ElasticMembers::kMaxQuickFailures; ++start) {
    EXPECT_EQ(job.replaced.size(), static_cast<std::size_t>(start));
    job.wait(299);
    EXPECT_EQ(job.killed.size(), static_cast<std::size_t>(start - 1));
    ASSERT_TRUE(job.members.next_timer());
    job.wait((*job.members.next_timer() - job.now).count());
    ASSERT_EQ(job.killed.size(), static_cast<std::size_t>(start));
    job.dies(1);
    job.wait(30);
  }
  EXPECT_EQ(job.replaced.size(), std::size_t{ElasticMembers::kMaxQuickFailures - 1}) << job.text;
  EXPECT_NE(job.text.find("worker 1 has failed 5 times in a row"), std::string::npos) << job.text;
  EXPECT_FALSE(job.ended) << "worker 0 goes on";
}

TEST(ElasticMembers, ASuspectOfTheCurrentGenerationIsEnded) {
  Job job(3);
  job.start();
  job.dies(0);
  job.all_join();
  job.take(job.members.on_lost(1, 1, {0}, job.now));
  EXPECT_TRUE(job.killed.empty()) << "an older generation's report";
  job.take(job.members.on_lost(1, 2, {1}, job.now));
  EXPECT_EQ(job.killed, Members({2})) << "rank 1 of generation 2";
  job.take(job.members.on_lost(1, 2, {7}, job.now));
  EXPECT_EQ(job.killed.size(), 1u);
}

TEST(ElasticMembers, AWorkerThatLeavesIsNotReplaced) {
  Job job(3);
  job.start();
  job.take(job.members.on_leaving(1, job.now));
  EXPECT_EQ(job.formed.back(), Members({0, 2}));
  job.ends(1);
  job.wait(100);
  EXPECT_TRUE(job.replaced.empty());
  EXPECT_EQ(job.formed.back(), Members({0, 2}));
}

TEST(ElasticMembers, AfterTheTrainingLateWorkersEnd) {
  Job job(3);
  job.start();
  job.dies(2);
  job.all_join();
  job.ends(0);
  EXPECT_EQ(job.killed, Members({2}));
  job.dies(2);
  EXPECT_FALSE(job.finished);
  job.ends(1);
  EXPECT_TRUE(job.finished);
  job.wait(100);
  EXPECT_EQ(job.replaced.size(), 1u);
  EXPECT_FALSE(job.ended);
}

TEST(ElasticMembers, AJobWhoseWorkersAllLeaveIsFinished) {
  Job job(2);
  job.start();
  job.leaves(0);
  EXPECT_FALSE(job.finished);
  job.leaves(1);
  EXPECT_TRUE(job.finished);
  EXPECT_FALSE(job.ended);
}

TEST(ElasticMembers, AWorkerThatLeavesDoesNotMakeAFailedJobAGoodOne) {
  Job job(2);
  job.start();
  job.leaves(0);
  for (int failure = 0; failure < ElasticMembers::kMaxQuickFailures; ++failure) {
    job.dies(1);
    job.wait(40);
  }
  EXPECT_TRUE(job.ended);
  EXPECT_FALSE(job.finished);
}

// ---- Other sizes

TEST(ElasticMembers, ASmallerJobAsksItsLastRanksToLeave) {
  Job job(4);
  job.start();
  job.resize(2);
  EXPECT_EQ(job.asked, Members({3, 2}));
  EXPECT_EQ(job.members.active(), 2);
  EXPECT_EQ(job.formed.size(), 1u) << "they finish their step";
  job.leaves(2);
  EXPECT_EQ(job.formed.back(), Members({0, 1, 3}));
  job.all_join();
  job.leaves(3);
  EXPECT_EQ(job.formed.back(), Members({0, 1}));
  job.wait(100);
  EXPECT_TRUE(job.replaced.empty());
}

TEST(ElasticMembers, AWorkerThatDiesWhileItIsAskedToLeaveIsNotReplaced) {
  Job job(2);
  job.start();
  job.resize(1);
  job.dies(1);
  job.wait(100);
  EXPECT_TRUE(job.replaced.empty());
  EXPECT_EQ(job.formed.back(), Members({0}));
}

TEST(ElasticMembers, AWorkerThatIsAskedToLeaveMayEndWithoutAWord) {
  Job job(2);
  job.start();
  job.resize(1);
  job.ends(1);
  EXPECT_EQ(job.formed.back(), Members({0}));
}

TEST(ElasticMembers, WorkersThatAreNoMembersYetAreEndedFirst) {
  Job job(3);
  job.start();
  job.dies(1);
  job.all_join();
  job.resize(2);
  EXPECT_EQ(job.killed, Members({1}));
  EXPECT_TRUE(job.asked.empty());
  job.dies(1);
  job.wait(100);
  EXPECT_EQ(job.replaced.size(), 1u);
}

TEST(ElasticMembers, ALargerJobStartsNewWorkers) {
  Job job(2);
  job.start();
  job.resize(4);
  ASSERT_EQ(job.replaced.size(), 2u);
  EXPECT_EQ(job.replaced[0].worker, 2);
  EXPECT_EQ(job.replaced[1].worker, 3);
  EXPECT_TRUE(job.replaced[1].joins_late);
  job.ready(3);
  job.all_join();
  job.ready(2);
  EXPECT_EQ(job.formed.back(), Members({0, 1, 3, 2}));
}

TEST(ElasticMembers, ALargerJobTakesNumbersOfWorkersThatHaveEnded) {
  Job job(3);
  job.start();
  job.resize(1);
  job.leaves(2);
  job.take(job.members.on_leaving(1, job.now));
  job.all_join();
  job.resize(3);
  ASSERT_EQ(job.replaced.size(), 2u) << "worker 1 still runs";
  EXPECT_EQ(job.replaced[0].worker, 2);
  EXPECT_EQ(job.replaced[1].worker, 3);
  job.ends(1);
  job.ready(2);
  job.all_join();
  job.ready(3);
  EXPECT_EQ(job.formed.back(), Members({0, 2, 3}));
}

// ---- Several nodes

TEST(ElasticMembers, TheWorkersOfALostNodeAreNotReplaced) {
  Job job(2);
  EXPECT_EQ(job.members.add_node(7, 2, job.now), 2);
  job.count = 4;
  job.start();
  EXPECT_EQ(job.members.node_of(3), 7);
  job.take(job.members.on_node_gone(7, false, job.now));
  EXPECT_EQ(job.formed.back(), Members({0, 1}));
  job.wait(100);
  EXPECT_TRUE(job.replaced.empty());
  EXPECT_EQ(job.members.active(), 2);
  job.all_join();
  EXPECT_EQ(job.members.add_node(8, 2, job.now), 2) << "the numbers of the lost node";
  job.ready(2);
  job.ready(3);
  job.all_join();
  job.take(job.members.on_time(job.now));
  EXPECT_EQ(job.formed.back(), Members({0, 1, 2, 3}));
  EXPECT_EQ(job.members.add_node(9, 1, job.now), 4);
}

TEST(ElasticMembers, WithoutItsWorkersTheJobWaitsForNodes) {
  Job job(1, {1, 8}, /*nodes_may_join=*/true);
  job.start();
  job.take(job.members.on_node_gone(0, false, job.now));
  EXPECT_FALSE(job.ended);
  EXPECT_NE(job.text.find("waiting for replacements and nodes"), std::string::npos) << job.text;
  job.members.add_node(1, 1, job.now);
  job.ready(0);
  EXPECT_EQ(job.formed.back(), Members({0}));
  job.take(job.members.on_node_gone(1, false, job.now));
  job.wait(301);
  EXPECT_TRUE(job.ended);
}

TEST(ElasticMembers, ALargerJobStartsWorkersWhereFewAre) {
  Job job(2);
  job.members.add_node(7, 1, job.now);
  job.count = 3;
  job.start();
  job.resize(5);
  ASSERT_EQ(job.replaced.size(), 2u);
  EXPECT_EQ(job.members.node_of(job.replaced[0].worker), 7);
  EXPECT_EQ(job.members.active_on(7) + job.members.active_on(0), 5);
  EXPECT_GE(job.members.active_on(7), 2);
}

TEST(ElasticMembers, WhereAMemberHasFinishedTheOthersMeetWithoutIt) {
  Job job(3);
  job.start();
  job.dies(2);  // generation 2: workers 0 and 1
  job.ends(0);  // it had finished before it saw generation 2
  EXPECT_EQ(job.formed.back(), Members({1}));
}

}  // namespace
}  // namespace maniple::launch
