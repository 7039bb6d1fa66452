// ProcessGroup::shrink: the survivors of a failed group go on, whoever dies and whenever.
#include <chrono>
#include <csignal>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fault/expect_error.h"
#include "fault/ways.h"

namespace maniple::harness {
namespace {

class Shrink : public EveryTransport {};

/// The global ranks of all members.
std::vector<int> members_of(const ProcessGroup& group) {
  std::vector<int> ranks;
  for (const auto& member : group.topology().members) ranks.push_back(member.global_rank);
  return ranks;
}

/// The group works, and has these members.
void expect_works(ProcessGroup& group, const Rank& r, const std::set<int>& dead) {
  std::vector<int> expected;
  for (int rank = 0; rank < r.size; ++rank) {
    if (dead.count(rank) == 0) expected.push_back(rank);
  }
  EXPECT_EQ(members_of(group), expected);
  EXPECT_EQ(group.error(), nullptr);
  std::vector<std::int64_t> sums(5000, r.rank);
  group.all_reduce(buffer_of(sums));
  std::int64_t sum = 0;
  for (const int rank : expected) sum += rank;
  EXPECT_EQ(sums, std::vector<std::int64_t>(5000, sum));
  const auto texts = group.all_gather_objects(std::to_string(r.rank));
  for (std::size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(texts[i], std::to_string(expected[i]));
}

/// Calls operations until the group fails.
void use_until_it_fails(ProcessGroup& group) {
  const Caught caught = catch_error([&] {
    for (;;) group.barrier();
  });
  EXPECT_TRUE(caught.is_one_of({ErrorKind::peer_lost, ErrorKind::aborted})) << caught;
}

RunOptions run_of(int n, TransportKind transport, std::vector<int> dead) {
  return {.n = n, .as = As::processes, .transport = transport, .expect_dead = std::move(dead)};
}

TEST_P(Shrink, AnyRankMayDieAlsoTheFirst) {
  for (const int victim : {0, 2, 3}) {
    run_ranks(run_of(4, GetParam(), {victim}), [&](Rank& r) {
      r.phase("all ranks run");
      if (r.rank == victim) r.kill_self();
      use_until_it_fails(*r.world);
      const auto survivors = r.world->shrink();
      expect_works(*survivors, r, {victim});
      EXPECT_TRUE(survivors->name().starts_with("world/survivors-")) << survivors->name();
      EXPECT_NE(r.world->error(), nullptr);  // the old group stays failed
    });
  }
}

TEST_P(Shrink, OneRankAfterTheOtherDownToOne) {
  run_ranks(run_of(5, GetParam(), {0, 1, 2, 3}), [](Rank& r) {
    auto group = r.world;
    std::set<int> dead;
    for (const int victim : {2, 0, 1, 3}) {
      r.phase("before " + std::to_string(victim));
      if (r.rank == victim) r.kill_self();
      if (group->size() > 1) use_until_it_fails(*group);
      group = group->shrink();
      dead.insert(victim);
      expect_works(*group, r, dead);
    }
    EXPECT_EQ(group->size(), 1);
  });
}

// The victims die at different moments of the others' agreement.
TEST_P(Shrink, RanksThatDieMeanwhile) {
  for (int delay_us = 0; delay_us <= 6000; delay_us += 500) {
    run_ranks(run_of(6, GetParam(), {0, 1, 4}), [&](Rank& r) {
      r.phase("all ranks run");
      if (r.rank == 4) r.kill_self();
      if (r.rank <= 1) {
        std::thread([delay_us, rank = r.rank] {
          // sleep: the moment of the fault
          std::this_thread::sleep_for(std::chrono::microseconds(delay_us + 300 * rank));
          ::kill(::getpid(), SIGKILL);
        }).detach();
      }
      use_until_it_fails(*r.world);
      auto group = r.world;
      while ((group = group->shrink())->size() > 3) use_until_it_fails(*group);  // a rank may die after the agreement
      if (r.rank <= 1) r.kill_self();
      expect_works(*group, r, {0, 1, 4});
    });
  }
}

TEST_P(Shrink, ASubGroupAndARankThatHasLeft) {
  run_ranks(run_of(5, GetParam(), {3}), [](Rank& r) {
    const auto group = r.world->split(r.rank == 0 ? -1 : 0);
    r.phase("all have the group");
    if (r.rank == 0) return;  // leaves
    if (r.rank == 3) r.kill_self();
    use_until_it_fails(*group);
    const auto survivors = group->shrink();
    EXPECT_EQ(members_of(*survivors), (std::vector<int>{1, 2, 4}));
    int one = 1;
    survivors->all_reduce(buffer_of(one));
    EXPECT_EQ(one, 3);
  });
}

TEST_P(Shrink, AGroupThatHasNotFailedAndTwice) {
  run_ranks({.n = 3, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    r.phase("all ranks run");
    if (r.rank != 1) {
      const Caught caught = catch_error([&] {
        for (;;) r.world->barrier();
      });
      EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
      EXPECT_TRUE(contains(caught.text, "rank 1 called shrink()")) << caught;
    }
    const auto first = r.world->shrink();
    expect_works(*first, r, {});
    const auto second = r.world->shrink();  // of the same group
    expect_works(*second, r, {});
    expect_works(*first, r, {});
    EXPECT_NE(first->name(), second->name());
  });
}

TEST_P(Shrink, NamesTheSurvivorThatDoesNotCallIt) {
  run_ranks({.n = 3, .as = As::processes, .transport = GetParam()}, [](Rank& r) {
    r.phase("all ranks run");
    if (r.rank != 2) {
      const Caught caught = catch_error([&] { r.world->shrink({}, {.timeout = std::chrono::milliseconds(300)}); });
      EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
      EXPECT_EQ(caught.info.ranks, (std::vector<int>{2})) << caught;
      EXPECT_TRUE(names_rank(caught.text, 2) && contains(caught.text, "has not called shrink()")) << caught;
    }
    r.phase("two have given up");
    expect_works(*r.world->shrink(), r, {});  // all call it now
  });
}

INSTANTIATE_TEST_SUITE_P(Faults, Shrink, process_transports(), transport_name);

TEST(ShrinkRanks, ThreadsOfAProcess) {
  run_ranks({.n = 3}, [](Rank& r) {
    r.phase("all ranks run");
    const auto first = r.world->shrink();
    expect_works(*first, r, {});
    expect_works(*r.world->shrink(), r, {});
  });
}

TEST(ShrinkRanks, AWorldOfOne) {
  run_ranks({.n = 1, .as = As::processes}, [](Rank& r) { expect_works(*r.world->shrink(), r, {}); });
}

TEST(ShrinkRanks, SeventyRanksLoseThree) {
  RunOptions run = run_of(70, TransportKind::shm, {0, 33, 69});
  run_ranks(run, [](Rank& r) {
    r.phase("all ranks run");
    if (r.rank == 0 || r.rank == 33 || r.rank == 69) r.kill_self();
    use_until_it_fails(*r.world);
    auto group = r.world;
    while ((group = group->shrink())->size() > 67) use_until_it_fails(*group);
    expect_works(*group, r, {0, 33, 69});
  });
}

TEST(ShrinkRanks, OnSeveralHosts) {
  RunOptions run{.n = 6, .as = As::netns};
  run.hosts = 3;
  run.expect_dead = {0, 1};
  run_ranks(run, [](Rank& r) {
    r.phase("all ranks run");
    if (r.rank <= 1) r.kill_self();  // all ranks of the first host
    use_until_it_fails(*r.world);
    auto group = r.world;
    while ((group = group->shrink())->size() > 4) use_until_it_fails(*group);
    expect_works(*group, r, {0, 1});
  });
}

}  // namespace
}  // namespace maniple::harness
