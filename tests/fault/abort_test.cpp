// abort(): every rank's current and later calls fail with the reason; other groups go on. Destructors abort.
#include <thread>

#include "comm/base/abort_signal.h"
#include "comm/group/matrix.h"
#include "fault/expect_error.h"

namespace maniple::harness {
namespace {

class AbortTest : public Operations {};
INSTANTIATE_TEST_SUITE_P(Few, AbortTest, testing::ValuesIn(places({2, 5})), name_of);

TEST_P(AbortTest, WakesEveryRankThatWaits) {
  run([](Rank& r) {
    r.world->barrier();
    r.phase("all are out of the barrier");
    if (r.rank == 0) {
      r.world->abort("the coffee is cold");
    } else {
      int x = 1;
      const Caught caught = catch_error([&] { r.world->all_reduce(buffer_of(x)); });
      EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
      EXPECT_TRUE(contains(caught.text, "the coffee is cold")) << caught;
      EXPECT_LT(caught.took, 5.0 * kSlowdown);
    }
    expect_aborted_from_now_on(r);
    r.world->abort("a later reason");  // the first cause stays
    const Caught later = catch_error([&] { r.world->barrier(); });
    EXPECT_TRUE(contains(later.text, "the coffee is cold")) << later;
    r.phase("all have seen it");
  });
}

TEST_P(AbortTest, MayBeCalledWhileItsOwnRankWaits) {
  run([](Rank& r) {
    r.world->barrier();
    r.phase("all are out of the barrier");
    if (r.rank == 0) {
      // The other ranks do not call it, so only the abort can end this.
      int x = 1;
      std::thread other([&] { r.world->abort("from another thread"); });
      const Caught caught = catch_error([&] { r.world->all_reduce(buffer_of(x)); });
      other.join();
      EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
      EXPECT_TRUE(contains(caught.text, "from another thread")) << caught;
    }
    r.phase("rank 0 is out");
    expect_aborted_from_now_on(r);
  });
}

TEST_P(AbortTest, FailsOperationsInFlightAndTheirContinuations) {
  run([](Rank& r) {
    r.world->barrier();
    r.phase("all are out of the barrier");
    if (r.rank == 0) {
      std::vector<int> x(10, 1);
      std::vector<Work> works;
      bool ran = false;
      for (int& value : x) works.push_back(r.world->all_reduce(buffer_of(value), ReduceOp::sum, {.async_op = true}));
      const Work next = works.back().then([&] { ran = true; });
      r.world->abort("enough");
      for (const Work& work : works) EXPECT_TRUE(catch_error([&] { work.wait(); }).is(ErrorKind::aborted));
      EXPECT_TRUE(catch_error([&] { next.wait(); }).is(ErrorKind::aborted));
      EXPECT_FALSE(ran);
    }
    r.phase("rank 0 is out");
  });
}

TEST_P(AbortTest, OfASubGroupLeavesTheWorldAlone) {
  run([](Rank& r) {
    const auto group = r.world->split(0);
    group->barrier();
    r.phase("all are past the barrier");  // one that is still in it would fail with the abort
    if (r.rank == 0) {
      group->abort("only this one");
    } else {
      EXPECT_TRUE(catch_error([&] { group->barrier(); }).is(ErrorKind::aborted));
    }
    int x = 1;
    r.world->all_reduce(buffer_of(x));
    EXPECT_EQ(x, r.size);
    const auto again = r.world->split(0);
    again->barrier();
  });
}

TEST_P(AbortTest, DroppingAGroupFailsWhatIsInFlightAndNeverBlocks) {
  run([](Rank& r) {
    auto group = r.world->split(0);
    group->barrier();
    int x = 1;
    if (r.rank == 0) {
      const Work work = group->all_reduce(buffer_of(x), ReduceOp::sum, {.async_op = true});
      const double start = now_s();
      group.reset();
      EXPECT_LT(now_s() - start, 5.0 * kSlowdown);
      EXPECT_TRUE(catch_error([&] { work.wait(); }).is(ErrorKind::aborted));
    }
    r.phase("rank 0 has dropped it");
    if (r.rank != 0) {
      Caught caught = catch_error([&] { group->all_reduce(buffer_of(x)); });
      // Rank 0 may have sent all that this one needed before it dropped the group; the next finds nothing.
      if (!caught.any && r.world->transport() == "tcp") caught = catch_error([&] { group->all_reduce(buffer_of(x)); });
      EXPECT_TRUE(caught.is_one_of({ErrorKind::aborted, ErrorKind::peer_lost})) << caught;
      EXPECT_TRUE(names_rank(caught.text, 0)) << caught;
    }
    r.world->barrier();
  });
}

// Only this rank had something pending, so this is not the others' concern.
TEST_P(AbortTest, DroppingAGroupWithAPendingReceiveLeavesTheOthersAlone) {
  run([](Rank& r) {
    auto group = r.world->split(0);
    group->barrier();
    int x = 1;
    if (r.rank == 0) {
      const Work work = group->irecv(buffer_of(x), r.size - 1, 3);
      const double start = now_s();
      group.reset();
      EXPECT_LT(now_s() - start, 5.0 * kSlowdown);
      const Caught caught = catch_error([&] { work.wait(); });
      EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
      EXPECT_TRUE(contains(caught.text, "the group was destroyed")) << caught;
    }
    r.world->barrier();
    r.world->barrier();  // a word that rank 0 spread would have come by now
    if (r.rank != 0) {
      EXPECT_EQ(group->error(), nullptr) << text_of(group->error());
    }
    r.phase("all have looked");
  });
}

TEST_P(AbortTest, ReceiveFromAnyoneEndsWhenAllOthersHaveLeft) {
  run([](Rank& r) {
    auto group = r.world->split(0);
    int x = r.rank;
    if (r.rank != 0) {
      group->send(buffer_of(x), 0);
      r.phase("all have sent");
      group.reset();
    } else {
      for (int i = 1; i < r.size; ++i) group->recv(buffer_of(x), kAnySource);
      r.phase("all have sent");
      const Caught caught = catch_error([&] { group->recv(buffer_of(x), kAnySource); });
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_LT(caught.took, 10.0 * kSlowdown);
    }
    r.phase("rank 0 has seen it");
  });
}

// Fault 36: what is started while another thread aborts the group ends with a typed error, and nothing else.
TEST_P(AbortTest, MeetsMessagesThatAreBeingStarted) {
  run([](Rank& r) {
    for (int round = 0; round < (kSanitized ? 5 : 20); ++round) {
      const auto group = r.world->split(0);
      r.world->barrier();
      const int next = (r.rank + 1) % r.size;
      std::vector<std::byte> large(3 << 20);
      std::thread aborting;
      if (r.rank == 0) aborting = std::thread([&] { group->abort("enough"); });
      Caught caught;
      while (!caught.any) {
        // Large messages without a receive, followed by small ones.
        std::vector<std::byte> small(16), in(16);
        std::vector<Work> works;
        caught = catch_error([&] {
          works.push_back(group->isend(buffer_of(large), next, 1));
          works.push_back(group->isend(buffer_of(small), next, 2));
          works.push_back(group->irecv(buffer_of(in), kAnySource, 3));
        });
        for (const Work& work : works) {
          if (const Caught failed = catch_error([&] { work.wait(); }); failed.any) caught = failed;
        }
      }
      if (aborting.joinable()) aborting.join();
      EXPECT_TRUE(caught.is_one_of({ErrorKind::aborted, ErrorKind::peer_lost})) << caught;
      r.world->barrier();
    }
  });
}

}  // namespace
}  // namespace maniple::harness
