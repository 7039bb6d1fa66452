#include "comm/shm/arena.h"

#include <sched.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "comm/shm/sleeper.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;
using Clock = Deadline::Clock;

constexpr std::size_t kStage = 64 * 1024;

OperationContext soon() { return OperationContext(Deadline::after(std::chrono::seconds(30))); }

// The ranks of a group, as threads. Errors call rank r "10 + r"; in the world it is 20 + r.
class World {
 public:
  explicit World(int size, double spin_us = -1)
      : aborts(static_cast<std::size_t>(size)), segment(Segment::create(ArenaLayout::of(size, kStage).bytes)) {
    for (int r = 0; r < size; ++r) {
      ArenaOptions options;
      options.rank = r;
      options.size = size;
      options.spin_us = spin_us;
      options.abort = &aborts[static_cast<std::size_t>(r)];
      for (int i = 0; i < size; ++i) {
        options.names.push_back(10 + i);
        options.global_ranks.push_back(20 + i);
      }
      arenas.push_back(std::make_unique<Arena>(segment, options));
    }
  }
  Arena& operator[](int rank) { return *arenas[static_cast<std::size_t>(rank)]; }
  void leave(int rank) { arenas[static_cast<std::size_t>(rank)].reset(); }

  std::vector<AbortSignal> aborts;
  std::shared_ptr<Segment> segment;
  std::vector<std::unique_ptr<Arena>> arenas;
};

TEST(Arena, PartsLieInTheSegmentAndApart) {
  constexpr int kRanks = 3;
  World world(kRanks);
  std::vector<std::pair<std::byte*, std::byte*>> parts;
  for (int r = 0; r < kRanks; ++r) {
    for (std::uint32_t s = 0; s < Arena::kStageSlots; ++s)
      parts.emplace_back(world[0].stage_slot(r, s), world[0].stage_slot(r, s) + world[0].stage_slot_bytes());
    for (std::uint32_t epoch = 0; epoch < Arena::kContributions; ++epoch) {
      auto* const memory = reinterpret_cast<std::byte*>(&world[0].contribution(r, epoch));
      parts.emplace_back(memory, memory + sizeof(Contribution));
      std::byte* const payload = world[0].payload(r, epoch, world[0].payload_bytes());
      parts.emplace_back(payload, payload + world[0].payload_bytes());
    }
    for (int to = 0; to < kRanks; ++to) {
      for (int set = 0; set < 2; ++set) {
        const auto ring = world[0].ring(set, r, to);
        parts.emplace_back(ring.data(), ring.data() + ring.size());
      }
    }
  }
  std::sort(parts.begin(), parts.end());
  EXPECT_GE(parts.front().first, world.segment->data());
  EXPECT_LE(parts.back().second, world.segment->data() + world.segment->size());
  for (std::size_t i = 1; i < parts.size(); ++i) EXPECT_LE(parts[i - 1].second, parts[i].first) << i;
  EXPECT_EQ(world[0].stage_slot(1, 0), world[2].stage_slot(1, Arena::kStageSlots));  // in turn, and the same for all
}

TEST(Arena, EveryRankReadsWhatAllPublished) {
  constexpr int kRanks = 3;
  constexpr std::uint64_t kRounds = 2000;
  World world(kRanks);
  std::vector<std::thread> ranks;
  std::atomic<int> wrong{0};
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&, r] {
      Arena& arena = world[r];
      for (std::uint64_t round = 0; round < kRounds; ++round) {
        OperationContext context = soon();
        const std::uint32_t epoch = arena.next_epoch();
        const std::uint64_t mine = round * kRanks + static_cast<unsigned>(r);
        const std::size_t bytes = arena.payload_bytes();
        arena.contribution(r, epoch).words[0] = mine;
        std::memcpy(arena.payload(r, epoch, bytes) + bytes - sizeof mine, &mine, sizeof mine);
        arena.publish(epoch);
        arena.await_contributions(epoch, context);
        for (int peer = 0; peer < kRanks; ++peer) {
          const Contribution& theirs = arena.contribution(peer, epoch);
          std::uint64_t tail = 0;
          std::memcpy(&tail, arena.payload(peer, epoch, bytes) + bytes - sizeof tail, sizeof tail);
          const std::uint64_t expected = round * kRanks + static_cast<unsigned>(peer);
          if (theirs.words[0] != expected || tail != expected) ++wrong;
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Arena, AContributionStaysUntilTheSlowestRankHasReadIt) {
  // Rank 0 only publishes. Rank 1 reads each contribution as late as it may: rank 0 waits for it where it must.
  constexpr std::uint32_t kEpochs = 400;
  World world(2);
  std::thread sender([&] {
    for (std::uint32_t i = 0; i < kEpochs; ++i) {
      OperationContext context = soon();
      const std::uint32_t epoch = world[0].next_epoch();
      world[0].contribution(0, epoch).words[0] = epoch;
      world[0].publish(epoch);
      if (world[0].is_ahead(epoch)) world[0].await_contributions(epoch - Arena::kWindow, context);
    }
  });
  std::uint32_t wrong = 0;
  std::uint32_t furthest = 0;
  for (std::uint32_t i = 0; i < kEpochs; ++i) {
    OperationContext context = soon();
    const std::uint32_t epoch = world[1].next_epoch();
    world[1].publish(epoch);
    // The sender must stop before the contribution that would take this one's place.
    const std::uint32_t last = std::min(epoch + 2 * Arena::kWindow, kEpochs);
    if (epoch % Arena::kWindow == 0) world[1].await_contribution(0, last, context);
    while (furthest < kEpochs && world[1].has_published(0, furthest + 1)) ++furthest;
    if (furthest > epoch + 2 * Arena::kWindow) ++wrong;
    world[1].await_contribution(0, epoch, context);
    for (std::uint32_t back = 0; back < 2 * Arena::kWindow && back < epoch; ++back) {
      if (world[1].contribution(0, epoch - back).words[0] != epoch - back) ++wrong;
    }
  }
  sender.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(furthest, kEpochs);
}

TEST(Arena, CountersCarryBytesThroughTheStage) {
  constexpr std::uint32_t kSteps = 1000;
  World world(2);
  std::thread sender([&] {
    OperationContext context = soon();
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      // A slot may be filled again when the other side has drained it.
      if (step >= Arena::kStageSlots) world[0].await(Counter::drained, 1, step - Arena::kStageSlots + 1, context);
      std::memcpy(world[0].stage_slot(0, step), &step, sizeof step);
      world[0].set(Counter::filled, step + 1);
    }
  });
  OperationContext context = soon();
  std::uint32_t wrong = 0;
  for (std::uint32_t step = 0; step < kSteps; ++step) {
    world[1].await_all(Counter::filled, step + 1, context);
    std::uint32_t value = 0;
    std::memcpy(&value, world[1].stage_slot(0, step), sizeof value);
    wrong += value != step ? 1 : 0;
    world[1].set(Counter::drained, step + 1);
  }
  sender.join();
  EXPECT_EQ(wrong, 0u);
}

TEST(Arena, TheEndOfAShortWaitIsForgottenInALongOne) {
  World world(3, 50'000);  // long enough to be found spinning
  OperationContext context = soon();
  std::atomic<bool> begun{false};
  Sleeper waiting([&] {
    begun = true;
    world[0].await_contributions(world[0].next_epoch(), context);
  });
  while (!begun) ::sched_yield();
  world[1].publish(world[1].next_epoch());
  EXPECT_TRUE(waiting.falls_asleep());
  world[2].publish(world[2].next_epoch());
  waiting.join();
  EXPECT_EQ(context.take_end(), 0u);
}

TEST(Arena, AVeryOldFinishedCounterDoesNotCompleteANewEpoch) {
  World world(2);
  // Rank 1 takes part in more epochs than half of those that can be told apart, and none is one that counts `finished`.
  // It publishes all; those are taken here that matter.
  for (std::uint64_t done = 0; done < std::uint64_t{1} << 31; done += Arena::kRefresh)
    world[1].publish(world[1].next_epoch(Arena::kRefresh));
  const std::uint32_t epoch = world[1].next_epoch(100);
  OperationContext context(Deadline::after(milliseconds(1)));
  EXPECT_THROW(world[0].await(Counter::finished, 1, epoch, context), Timeout);
  world[1].set(Counter::finished, epoch);
  OperationContext again = soon();
  world[0].await(Counter::finished, 1, epoch, again);
}

TEST(Arena, ARankThatLeftIsLost) {
  World world(2);
  world.leave(1);
  EXPECT_TRUE(world[0].has_left(1));
  OperationContext context = soon();
  try {
    world[0].await_contributions(world[0].next_epoch(), context);
    ADD_FAILURE() << "no rank noticed";
  } catch (const PeerLost& lost) {
    EXPECT_EQ(lost.rank(), 21);
    EXPECT_THAT(lost.what(), HasSubstr("rank 11 has left the group"));
    EXPECT_EQ(lost.info().loss, LossKind::left);
  }
  World other(2);
  other[0].mark_gone(1);
  OperationContext again = soon();
  try {
    other[0].await(Counter::filled, 1, 1, again);
    ADD_FAILURE() << "no rank noticed";
  } catch (const PeerLost& lost) {
    EXPECT_EQ(lost.info().loss, LossKind::left_or_ended);
  }
}

TEST(Arena, DataOfALeavingRankIsUsedFirst) {
  World world(2);
  const std::uint32_t epoch = world[1].next_epoch();
  world[1].contribution(1, epoch).words[0] = 42;
  world[1].publish(epoch);
  world.leave(1);
  OperationContext context = soon();
  world[0].await_contributions(world[0].next_epoch(), context);
  EXPECT_EQ(world[0].contribution(1, epoch).words[0], 42u);
}

TEST(Arena, LeavingWakesThoseWhoSleep) {
  World world(2);
  bool lost = false;
  Sleeper waiting([&] {
    OperationContext context = soon();
    try {
      world[0].await_contributions(world[0].next_epoch(), context);
    } catch (const PeerLost&) {
      lost = true;
    }
  });
  EXPECT_TRUE(waiting.falls_asleep());
  world.leave(1);
  waiting.join();
  EXPECT_TRUE(lost);
}

TEST(Arena, RaisingWakesThoseWhoSleepWithTheCause) {
  World world(2);
  int lost = -1;
  std::string text;
  Sleeper waiting([&] {
    OperationContext context = soon();
    try {
      world[0].await_contributions(world[0].next_epoch(), context);
    } catch (const PeerLost& error) {
      lost = error.rank();
      text = error.what();
    }
  });
  EXPECT_TRUE(waiting.falls_asleep());
  const auto start = Clock::now();
  world[1].raise(std::make_exception_ptr(PeerLost("rank 7 is gone", 7)));
  waiting.join();
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(lost, 7);
  EXPECT_EQ(text, "rank 7 is gone");
}

TEST(Arena, TheFirstCauseWinsAndKeepsItsKind) {
  World world(2);
  EXPECT_EQ(world[0].raised(), nullptr);
  world[1].raise(std::make_exception_ptr(Mismatch("first")));
  world[0].raise(std::make_exception_ptr(PeerLost("second", 1)));
  try {
    std::rethrow_exception(world[0].raised());
  } catch (const Mismatch& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  World other(2);
  other[0].raise(std::make_exception_ptr(Timeout(std::string(100'000, 'x'))));  // longer than there is room for
  EXPECT_THROW(std::rethrow_exception(other[1].raised()), Aborted);
}

TEST(Arena, TheCauseArrivesWithAllItsFields) {
  World world(2);
  const Mismatch cause({.operation = "all_reduce",
                        .sequence = 12,
                        .group = "world",
                        .rank = 1,
                        .size = 2,
                        .calls = {{.rank = 20, .call = "barrier #12", .place = "a.cpp:1"}, {.rank = 21, .call = "x"}},
                        .reason = "ranks called different things"});
  world[1].raise(std::make_exception_ptr(cause));
  try {
    std::rethrow_exception(world[0].raised());
  } catch (const Mismatch& error) {
    EXPECT_STREQ(error.what(), cause.what());
    EXPECT_EQ(error.info().operation, "all_reduce");
    EXPECT_EQ(error.info().sequence, 12u);
    EXPECT_EQ(error.info().calls, cause.info().calls);
    EXPECT_EQ(error.info().origin, 21) << "the rank that raised it";
  }
  World other(2);
  other[0].raise(std::make_exception_ptr(Timeout("late", {21}, 1.5)));
  try {
    std::rethrow_exception(other[1].raised());
  } catch (const Aborted& error) {
    EXPECT_EQ(error.info().ranks, std::vector<int>{21});
    EXPECT_EQ(error.info().waited_s, 1.5);
    EXPECT_EQ(error.info().origin, 20);
  }
}

TEST(Arena, TheGroupsOwnAbortEndsAWait) {
  World world(2);
  world.aborts[0].raise(std::make_exception_ptr(Mismatch("from the failure detector")));
  OperationContext context = soon();
  EXPECT_THROW(world[0].await(Counter::filled, 1, 1, context), Mismatch);
}

TEST(Arena, ATimeoutNamesTheMissing) {
  World world(5);
  for (const int rank : {0, 2, 4}) world[rank].publish(world[rank].next_epoch());
  OperationContext context(Deadline::after(milliseconds(30)));
  try {
    world[0].await_contributions(1, context);
    ADD_FAILURE() << "no rank was missing";
  } catch (const Timeout& timeout) {
    EXPECT_THAT(timeout.what(), AllOf(StartsWith("timed out after 0."),
                                      EndsWith(" s: 3 of 5 ranks arrived, waiting for ranks 11, 13")));
    EXPECT_EQ(timeout.info().ranks, (std::vector<int>{21, 23})) << "in the world";
    EXPECT_GE(timeout.info().waited_s, 0.03);
  }
  OperationContext again(Deadline::after(milliseconds(30)));
  try {
    world[0].await(Counter::filled, 1, 1, again);
    ADD_FAILURE() << "no rank was missing";
  } catch (const Timeout& timeout) {
    EXPECT_THAT(timeout.what(), AllOf(StartsWith("timed out after 0."), EndsWith(" s: waiting for rank 11")));
    EXPECT_EQ(timeout.info().ranks, std::vector<int>{21});
  }
}

TEST(Arena, NotificationsWakeOnlyTheirRank) {
  World world(2);
  const std::uint32_t seen = world[0].notifications();
  const std::uint32_t other = world[1].notifications();
  Sleeper waiting([&] { world[0].await_notification(seen, Deadline::after(std::chrono::seconds(30))); });
  EXPECT_TRUE(waiting.falls_asleep());
  const auto start = Clock::now();
  world[1].notify(0);
  waiting.join();
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
  EXPECT_NE(world[0].notifications(), seen);
  EXPECT_EQ(world[1].notifications(), other);
  world[0].await_notification(world[0].notifications(), Deadline::after(milliseconds(1)));  // or the deadline comes
}

}  // namespace
}  // namespace maniple
