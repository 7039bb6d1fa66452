#include "comm/rendezvous/round.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <future>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include <maniple/comm/error.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

MeetOptions options_for(int rank, int world_size, const std::string& announcement, Deadline deadline = soon()) {
  return {.rank = rank,
          .world_size = world_size,
          .announcement = announcement,
          .combine = [](const std::vector<std::string>& all) { return fmt::format("{}", fmt::join(all, "+")); },
          .deadline = deadline};
}

std::string timeout_text(const std::shared_ptr<Store>& store, int rank, int world_size) {
  try {
    meet(store, options_for(rank, world_size, "x", Deadline::after(milliseconds(20))));
  } catch (const Timeout& timeout) {
    return timeout.what();
  }
  return "no timeout";
}

TEST(Round, ListsOfRanksAreShort) {
  EXPECT_EQ(list_ranks({}), "");
  EXPECT_EQ(list_ranks({4}), "4");
  EXPECT_EQ(list_ranks({3, 5}), "3, 5");
  EXPECT_EQ(list_ranks({3, 4}), "3, 4");
  EXPECT_EQ(list_ranks({3, 5, 6, 7, 9}), "3, 5-7, 9");
  EXPECT_EQ(list_ranks({0, 1, 2, 3}), "0-3");
}

TEST(Round, EveryoneGetsTheSameOnce) {
  const auto store = make_memory_store();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([=] {
      for (int round = 0; round < 20; ++round) {
        const Met met = meet(store, options_for(rank, 3, fmt::format("{}.{}", rank, round)));
        EXPECT_EQ(met.result, fmt::format("0.{0}+1.{0}+2.{0}", round));
        EXPECT_EQ(met.store->add(fmt::format("times/{}", rank), 1), 1) << "keys of another round";
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(Round, MissingRanksAreNamed) {
  const auto store = make_memory_store();
  EXPECT_THAT(timeout_text(store, 5, 8), HasSubstr("1 of 8 ranks joined, waiting for ranks 0-4, 6, 7"));
  std::thread other(
      [&] { EXPECT_THROW(meet(store, options_for(5, 8, "x", Deadline::after(milliseconds(500)))), Timeout); });
  const std::string present[] = {"maniple/round-0/maniple/joined/5"};
  store->wait(present, soon());
  EXPECT_THAT(timeout_text(store, 7, 8), HasSubstr("2 of 8 ranks joined, waiting for ranks 0-4, 6. Was"));
  other.join();
}

// However often each of them has tried before.
TEST(Round, NumbersOfAttemptsMayDiffer) {
  const auto store = make_memory_store();
  for (int rank = 0; rank < 3; ++rank) {
    for (int tries = 0; tries < 3 * rank + 1; ++tries) timeout_text(store, rank, 3);
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([=] { EXPECT_EQ(meet(store, options_for(rank, 3, std::to_string(rank))).result, "0+1+2"); });
  }
  for (std::thread& rank : ranks) rank.join();
}

// Its announcement stays, as if its process could not take it back; the round is closed with it.
TEST(Round, AStaleAnnouncementCostsOneRoundOnly) {
  const auto store = make_memory_store();
  const auto stale = make_prefix_store("maniple/round-0", store);
  std::string bytes(8, 'n');
  bytes += std::string("\5\0\0\0", 4) + "stale";
  stale->set("maniple/joined/1", bytes);
  EXPECT_EQ(meet(store, options_for(0, 2, "0")).result, "0+stale");
  store->set("maniple/round", "0");  // as rank 1 finds it that comes a moment before it is closed
  std::thread late([&] { EXPECT_EQ(meet(store, options_for(1, 2, "1")).result, "again+1"); });
  while (stale->get("maniple/joined/1", soon()) == bytes) std::this_thread::yield();
  store->set("maniple/round", "1");
  EXPECT_EQ(meet(store, options_for(0, 2, "again")).result, "again+1");
  late.join();
}

TEST(Round, ALateRankIsNamedWhileOthersWait) {
  ::setenv("MANIPLE_WAIT_REPORT", "0.05", 1);
  testing::internal::CaptureStderr();
  const auto store = make_memory_store();
  const auto wait_for_rank_2 = [&](int rank) {
    EXPECT_THROW(meet(store, options_for(rank, 3, "x", Deadline::after(milliseconds(2000)))), Timeout);
  };
  std::thread other([&] { wait_for_rank_2(1); });
  wait_for_rank_2(0);
  other.join();
  const std::string log = testing::internal::GetCapturedStderr();
  ::unsetenv("MANIPLE_WAIT_REPORT");
  EXPECT_THAT(log, HasSubstr(" of 3 ranks joined, waiting for rank"));
  EXPECT_THAT(log, HasSubstr("2 of 3 ranks joined, waiting for rank 2 (memory store"));
}

TEST(Round, AWaitIsNoted) {
  ::setenv("MANIPLE_WAIT_REPORT", "0.02", 1);
  testing::internal::CaptureStderr();
  {
    const WaitNotice notice("nothing happens");
    std::this_thread::sleep_for(milliseconds(300));  // sleep: a long wait is what is tested
  }
  {
    const WaitNotice notice("this is short");
  }
  const std::string log = testing::internal::GetCapturedStderr();
  ::unsetenv("MANIPLE_WAIT_REPORT");
  EXPECT_THAT(log, HasSubstr(" s: nothing happens"));
  EXPECT_EQ(log.find("this is short"), std::string::npos);
}

TEST(Round, RanksAreGivenOnceAndAgainWhenGivenBack) {
  const auto store = make_memory_store();
  std::vector<TakenRank> taken;
  for (int rank = 0; rank < 3; ++rank) {
    taken.push_back(take_rank(store, 3, soon()));
    EXPECT_EQ(taken.back().rank, rank) << "in the order of arrival";
  }
  EXPECT_THROW(take_rank(store, 3, Deadline::after(milliseconds(20))), Timeout);
  taken[1].give_back();
  EXPECT_EQ(take_rank(store, 3, soon()).rank, 1);
  store->add("maniple/round", 1);
  std::set<int> next;
  for (int i = 0; i < 3; ++i) next.insert(take_rank(store, 3, soon()).rank);
  EXPECT_EQ(next, (std::set<int>{0, 1, 2}));
}

}  // namespace
}  // namespace maniple
