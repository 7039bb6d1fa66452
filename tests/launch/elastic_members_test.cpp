// Which workers of an elastic job form a generation: single decisions, and random jobs.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <random>
#include <string>
#include <vector>

#include "comm/base/overloaded.h"
#include "launch/coordinate/elastic_members.h"

namespace maniple::launch {
namespace {

using Time = ElasticMembers::Time;

/// Collects what the job is told to do.
struct Job {
  explicit Job(int workers, ElasticRange range = {1, 8}) : members(range, {}, Time(300)), count(workers) {
    members.begin(workers, now);
  }
  void take(const MemberActions& actions) {
    for (const MemberAction& action : actions) {
      std::visit(overloaded{[&](const members::Form& form) { formed.push_back(form.members); },
                            [&](const members::Replace& replace) { replaced.push_back(replace); },
                            [&](const members::Kill& kill) { killed.push_back(kill.worker); },
                            [&](const members::Print& shown) { text += shown.text + "\n"; },
                            [&](const members::End&) { ended = true; }},
                 action);
    }
  }
  void ready(int worker) { take(members.on_ready(worker, now)); }
  void joined(int worker) { take(members.on_joined(worker, now)); }
  void all_join() {
    for (const int worker : std::vector<int>(members.ranks())) joined(worker);
  }
  void dies(int worker) { take(members.on_exit({.rank = worker, .pid = 100 + worker, .signal = SIGKILL}, now)); }
  void ends(int worker) { take(members.on_exit({.rank = worker, .pid = 100 + worker}, now)); }
  void wait(double seconds) {
    now += Time(seconds);
    take(members.on_time(now));
  }
  void start() {
    for (int worker = 0; worker < count; ++worker) ready(worker);
    all_join();
  }

  Time now{0};
  ElasticMembers members;
  int count;
  std::vector<std::vector<int>> formed;
  std::vector<members::Replace> replaced;
  std::vector<int> killed;
  std::string text;
  bool ended = false;
};

using Members = std::vector<int>;

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
  job.ends(1);
  job.wait(100);
  EXPECT_EQ(job.replaced.size(), 1u);
  EXPECT_FALSE(job.ended);
}

TEST(ElasticMembers, WhereAMemberHasFinishedTheOthersMeetWithoutIt) {
  Job job(3);
  job.start();
  job.dies(2);  // generation 2: workers 0 and 1
  job.ends(0);  // it had finished before it saw generation 2
  EXPECT_EQ(job.formed.back(), Members({1}));
}

// Workers die, come, leave and meet at random times.
TEST(ElasticMembers, RandomJobs) {
  for (unsigned seed = 0; seed < 20'000; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
    const int workers = 1 + below(6), least = 1 + below(workers);
    Job job(workers, {least, workers});
    enum class Process { starting, waiting, gone };
    std::vector<Process> processes(static_cast<std::size_t>(workers), Process::starting);
    const auto of = [&](int worker) -> Process& { return processes[static_cast<std::size_t>(worker)]; };
    std::size_t seen = 0, seen_replaced = 0;
    Members before;
    const auto check = [&] {
      for (; seen < job.formed.size(); ++seen) {
        const Members& now = job.formed[seen];
        ASSERT_GE(static_cast<int>(now.size()), least);
        for (const int worker : now) ASSERT_EQ(of(worker), Process::waiting) << "a member that cannot answer";
        Members survivors;
        for (const int worker : before) {
          if (std::find(now.begin(), now.end(), worker) != now.end()) survivors.push_back(worker);
        }
        ASSERT_TRUE(std::equal(survivors.begin(), survivors.end(), now.begin())) << "survivors keep their order";
        before = now;
      }
      for (; seen_replaced < job.replaced.size(); ++seen_replaced) {
        const int worker = job.replaced[seen_replaced].worker;
        ASSERT_EQ(of(worker), Process::gone);
        of(worker) = Process::starting;
        before.erase(std::remove(before.begin(), before.end(), worker), before.end());
      }
    };
    for (int event = 0; event < 60 && !job.ended; ++event) {
      const int worker = below(workers);
      switch (below(5)) {
        case 0:
          if (of(worker) == Process::starting) {
            of(worker) = Process::waiting;
            job.ready(worker);
          }
          break;
        case 1:
          if (of(worker) == Process::starting || of(worker) == Process::waiting) {
            of(worker) = Process::gone;
            job.dies(worker);
          }
          break;
        case 2: job.all_join(); break;
        default: job.wait(0.1 * below(100)); break;
      }
      ASSERT_NO_FATAL_FAILURE(check()) << "seed " << seed;
    }
    if (job.ended) continue;
    // Everything that can come comes: the last generation has all that live.
    for (int round = 0; round < 20 && !job.ended; ++round) {
      job.wait(31);
      ASSERT_NO_FATAL_FAILURE(check()) << "seed " << seed;
      for (int worker = 0; worker < workers; ++worker) {
        if (of(worker) != Process::starting) continue;
        of(worker) = Process::waiting;
        job.ready(worker);
      }
      job.all_join();
      ASSERT_NO_FATAL_FAILURE(check()) << "seed " << seed;
    }
    if (job.ended) continue;
    Members live, last = job.formed.empty() ? Members() : job.formed.back();
    for (int worker = 0; worker < workers; ++worker) {
      if (of(worker) == Process::waiting) live.push_back(worker);
    }
    std::sort(last.begin(), last.end());
    if (static_cast<int>(live.size()) >= least) {
      ASSERT_EQ(last, live) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace maniple::launch
