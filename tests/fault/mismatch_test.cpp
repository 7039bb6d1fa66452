// Fault 25: ranks that call different things all get a Mismatch that lists what each of them called.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "comm/base/files.h"
#include "comm/group/matrix.h"
#include "fault/expect_error.h"
#include "fault/ways.h"

namespace maniple::harness {
namespace {

class MismatchTest : public Operations {
 protected:
  /// The fields say what the text says: the call of the odd rank, and other ones.
  static void expect_calls(const Caught& caught, const Rank& r, int odd) {
    const std::vector<RankCall>& calls = caught.info.calls;
    const auto of_odd =
        std::find_if(calls.begin(), calls.end(), [odd](const RankCall& call) { return call.rank == odd; });
    ASSERT_NE(of_odd, calls.end()) << caught;
    EXPECT_GE(calls.size(), 2u) << caught;
    // Over a network a rank may not say in time what it called.
    if (r.world->transport() == "shm") {
      EXPECT_EQ(calls.size(), static_cast<std::size_t>(r.size)) << caught;
    }
    for (const RankCall& call : calls) {
      EXPECT_TRUE(contains(caught.text, call.call)) << call.call << " is not in: " << caught;
      EXPECT_TRUE(call.place.empty() || contains(call.place, ".cpp:")) << call.place;
      if (call.rank != odd) {
        EXPECT_NE(call.call, of_odd->call) << caught;
      }
    }
  }

  /// Runs `call(r, odd)` on all ranks, where odd is true on one of them; all must get Mismatch with these words.
  void expect_mismatch(const std::vector<std::string>& words, const std::function<void(Rank&, bool odd)>& call) {
    const int n = GetParam().n;
    for (const int odd : {0, n - 1}) {
      run([&](Rank& r) {
        r.phase("all have joined");
        r.world->barrier();
        const Caught caught = catch_error([&] {
          call(r, r.rank == odd);
          r.world->barrier();  // a rank that only sends may hear of it one operation later
        });
        EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << "odd rank " << odd << ": " << caught;
        for (const std::string& word : words)
          EXPECT_TRUE(contains(caught.text, word)) << '"' << word << "\" is not in: " << caught;
        EXPECT_TRUE(names_rank(caught.text, odd)) << caught;
        expect_calls(caught, r, odd);
        EXPECT_LT(caught.took, 5.0 * kSlowdown);
        expect_aborted_from_now_on(r);
      });
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Few, MismatchTest, testing::ValuesIn(places({2, 3, 5})), name_of);

TEST_P(MismatchTest, Operation) {
  expect_mismatch({"all_reduce", "broadcast"}, [](Rank& r, bool odd) {
    std::vector<float> x(1000);
    odd ? r.world->broadcast(buffer_of(x), 0) : r.world->all_reduce(buffer_of(x));
  });
}

TEST_P(MismatchTest, BarrierAgainstAllReduce) {
  expect_mismatch({"all_reduce", "barrier"}, [](Rank& r, bool odd) {
    int x = 1;
    odd ? r.world->barrier() : r.world->all_reduce(buffer_of(x));
  });
}

TEST_P(MismatchTest, DType) {
  expect_mismatch({"float32", "int32"}, [](Rank& r, bool odd) {
    std::vector<float> x(1000);
    std::vector<std::int32_t> y(1000);
    r.world->all_reduce(odd ? buffer_of(y) : buffer_of(x));
  });
}

TEST_P(MismatchTest, Count) {
  expect_mismatch({"1000", "1001"}, [](Rank& r, bool odd) {
    std::vector<float> x(odd ? 1001 : 1000);
    r.world->all_reduce(buffer_of(x));
  });
}

TEST_P(MismatchTest, CountOfLargeBuffers) {
  expect_mismatch({"500000", "400000"}, [](Rank& r, bool odd) {
    std::vector<float> x(odd ? 500000 : 400000);
    r.world->all_reduce(buffer_of(x));
  });
}

TEST_P(MismatchTest, EmptyAgainstFull) {
  expect_mismatch({"all_reduce"}, [](Rank& r, bool odd) {
    std::vector<float> x(odd ? 0 : 1000);
    r.world->all_reduce(buffer_of(x));
  });
}

TEST_P(MismatchTest, CountInRegisteredMemory) {
  expect_mismatch({"1000", "1001"}, [](Rank& r, bool odd) {
    const RegisteredMemory memory = r.world->allocate(8000);
    r.world->all_reduce(buffer_of(memory.as<float>(odd ? 1001 : 1000)));
  });
}

TEST_P(MismatchTest, Root) {
  expect_mismatch({"broadcast", "root"}, [](Rank& r, bool odd) {
    std::vector<float> x(1000);
    r.world->broadcast(buffer_of(x), odd ? 1 : 0);
  });
}

TEST_P(MismatchTest, RootOfOperationsThatSomeOnlySendIn) {
  const auto root = [](bool odd) { return odd ? 1 : 0; };
  expect_mismatch({"reduce", "root"}, [&](Rank& r, bool odd) {
    float x = 1, sum = 0;
    r.world->reduce(buffer_of(x), buffer_of(sum), root(odd));
  });
  expect_mismatch({"gather", "root"}, [&](Rank& r, bool odd) {
    float x = 1;
    std::vector<float> all(r.size);
    r.world->gather(buffer_of(x), buffer_of(all), root(odd));
  });
  expect_mismatch({"scatter", "root"}, [&](Rank& r, bool odd) {
    float x = 1;
    std::vector<float> all(r.size);
    r.world->scatter(buffer_of(all), buffer_of(x), root(odd));
  });
}

TEST_P(MismatchTest, CountOfAReduceWhoseSendersDoNotWait) {
  expect_mismatch({"reduce", "float32[3]", "float32[4]"}, [](Rank& r, bool odd) {
    std::vector<float> x(odd ? 3 : 4), sum(x.size());
    r.world->reduce(buffer_of(x), buffer_of(sum), 0);
  });
}

// All ranks only send, and go on: what they call next is the same again, but not what they called before.
TEST_P(MismatchTest, IsFoundByALaterCallIfNoRankWaits) {
  for (const int more : {0, 1, 3, 4, 11}) {
    run([more](Rank& r) {
      if (r.world->transport() == "tcp") return;  // there the root receives data for the other root
      r.phase("all have joined");
      r.world->barrier();
      float x = 1, sum = 0;
      const Caught caught = catch_error([&] {
        r.world->reduce(buffer_of(x), buffer_of(sum), r.rank == 0 ? 1 : 0);
        for (int i = 0; i < more; ++i) r.world->broadcast(buffer_of(x), i % 2);
        r.world->barrier();
      });
      EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << more << ": " << caught;
      EXPECT_TRUE(contains(caught.text, "reduce #") && contains(caught.text, "root 0") &&
                  contains(caught.text, "root 1"))
          << caught;
      EXPECT_EQ(caught.info.calls.size(), static_cast<std::size_t>(r.size)) << caught;
      expect_aborted_from_now_on(r);
    });
  }
}

TEST_P(MismatchTest, ReduceOperation) {
  expect_mismatch({"sum", "max"}, [](Rank& r, bool odd) {
    std::vector<float> x(1000);
    r.world->all_reduce(buffer_of(x), odd ? ReduceOp::max : ReduceOp::sum);
  });
}

TEST_P(MismatchTest, Factor) {
  expect_mismatch({"premul_sum"}, [](Rank& r, bool odd) {
    std::vector<float> x(1000);
    r.world->all_reduce(buffer_of(x), ReduceOp::premultiplied(odd ? 0.5 : 0.25));
  });
}

TEST_P(MismatchTest, Order) {
  expect_mismatch({"all_reduce", "all_gather"}, [](Rank& r, bool odd) {
    std::vector<float> x(100), y(100 * r.size);
    for (int i = 0; i < 2; ++i) {
      (i == 0) == odd ? r.world->all_gather(buffer_of(x), buffer_of(y)) : r.world->all_reduce(buffer_of(x));
    }
  });
}

TEST_P(MismatchTest, OrderOfAsynchronousCalls) {
  expect_mismatch({"all_reduce", "broadcast"}, [](Rank& r, bool odd) {
    std::vector<float> x(100), y(100);
    const Work first = odd ? r.world->broadcast(buffer_of(y), 0, {.async_op = true})
                           : r.world->all_reduce(buffer_of(x), ReduceOp::sum, {.async_op = true});
    Work second;
    try {
      second = odd ? r.world->all_reduce(buffer_of(x), ReduceOp::sum, {.async_op = true})
                   : r.world->broadcast(buffer_of(y), 0, {.async_op = true});
    } catch (const Aborted&) {
      // The first has failed already; its Work says how.
    }
    first.wait();
    second.wait();
  });
}

TEST_P(MismatchTest, UnevenCounts) {
  expect_mismatch({"all_gather"}, [](Rank& r, bool odd) {
    // Each rank finds its own entry right; still the lists are not the same.
    std::vector<std::size_t> counts(r.size, 10);
    const std::size_t other = (r.rank + 1) % r.size;
    if (odd) counts[other] += 5;
    std::size_t total = 0;
    for (const std::size_t count : counts) total += count;
    std::vector<float> x(counts[r.rank]), y(total);
    r.world->all_gather(buffer_of(x), buffer_of(y), counts);
  });
}

TEST_P(MismatchTest, UnevenCountsOfAPremultipliedSum) {
  expect_mismatch({"reduce_scatter", "uneven"}, [](Rank& r, bool odd) {
    std::vector<std::size_t> counts(r.size, 10);
    counts[odd ? 0 : 1] += 5;
    std::vector<float> x(10 * r.size + 5), y(counts[r.rank]);
    r.world->reduce_scatter(buffer_of(x), buffer_of(y), ReduceOp::premultiplied(2), counts);
  });
}

TEST_P(MismatchTest, CoalescedBuffersOfOtherLengths) {
  for (const ReduceOp op : {ReduceOp(ReduceOp::sum), ReduceOp::premultiplied(2)}) {
    expect_mismatch({"all_reduce", "float32[8 in parts"}, [op](Rank& r, bool odd) {
      std::vector<float> x(odd ? 3 : 5), y(odd ? 5 : 3);
      const Buffer buffers[] = {buffer_of(x), buffer_of(y)};
      r.world->all_reduce_coalesced(buffers, op);
    });
  }
}

TEST_P(MismatchTest, AllToAllWithCountsAndWithout) {
  expect_mismatch({"all_to_all", "[uneven]", "[0]"}, [](Rank& r, bool odd) {
    // One rank has nothing to send or to receive, and gives no lists.
    const std::vector<std::size_t> none(r.size, 0);
    const Buffer empty{nullptr, 0, DType::float32};
    odd ? r.world->all_to_all(empty, empty) : r.world->all_to_all(empty, empty, none, none);
  });
}

TEST_P(MismatchTest, ListsOfNewGroups) {
  expect_mismatch({"new_group", "list"},
                  [](Rank& r, bool odd) { r.world->new_group(odd ? std::vector<int>{0, 1} : std::vector<int>{1, 0}); });
}

// Also what only one rank would refuse: the others do not wait for it.
TEST_P(MismatchTest, ListOfAGroupThatCannotBe) {
  expect_mismatch({"new_group", "list"},
                  [](Rank& r, bool odd) { r.world->new_group(std::vector<int>{0, odd ? 99 : 1}); });
}

TEST_P(MismatchTest, OptionsOfAGroup) {
  expect_mismatch({"new_group", "options"}, [](Rank& r, bool odd) {
    const auto timeout = odd ? std::optional<Seconds>(-1) : std::nullopt;
    r.world->new_group(std::vector<int>{0, 1}, {.timeout = timeout, .transport = {}, .algorithm = {}});
  });
}

TEST_P(MismatchTest, AlgorithmOfAGroup) {
  expect_mismatch({"new_group", "options"}, [](Rank& r, bool odd) {
    r.world->new_group(std::vector<int>{0, 1},
                       {.timeout = {}, .transport = {}, .algorithm = odd ? "fastest" : "direct"});
  });
}

TEST_P(MismatchTest, MessageOfAnotherLength) {
  run([](Rank& r) {
    r.phase("all have joined");  // a slow rank would otherwise get the failure in init()
    std::vector<float> x(r.rank == 0 ? 10 : 11);
    if (r.rank == 0) r.world->send(buffer_of(x), 1);
    if (r.rank == 1) {
      const Caught caught = catch_error([&] { r.world->recv(buffer_of(x), 0); });
      EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
      EXPECT_TRUE(contains(caught.text, "10") && contains(caught.text, "11")) << caught;
    }
    r.phase("rank 0 stays until rank 1 has its message");
  });
}

TEST_P(MismatchTest, MessageOfAnotherDType) {
  run([](Rank& r) {
    r.phase("all have joined");  // a slow rank would otherwise get the failure in init()
    float x = 1;
    std::int32_t y = 0;
    if (r.rank == 0) r.world->send(buffer_of(x), 1);
    if (r.rank == 1) {
      const Caught caught = catch_error([&] { r.world->recv(buffer_of(y), 0); });
      EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
    }
    r.phase("rank 0 stays until rank 1 has its message");
  });
}

// Two ranks disagree, and never meet: they wait for a third one, which waits for one of them.
TEST_P(MismatchTest, WhileAnotherRankIsAwaited) {
  if (GetParam().n < 3) return;
  using Call = std::function<void(Rank&, std::vector<float>&)>;
  const Call all_reduce = [](Rank& r, auto& x) { r.world->all_reduce(buffer_of(x)); };
  const Call reduced = [](Rank& r, auto& x) { r.world->all_reduce(buffer_of(x), ReduceOp::max); };
  const Call barrier = [](Rank& r, auto&) { r.world->barrier(); };
  const Call broadcast = [](Rank& r, auto& x) { r.world->broadcast(buffer_of(x), 2); };
  const Call scatter = [](Rank& r, auto& x) { r.world->scatter(buffer_of(x), buffer_of(x), 2); };
  for (const auto& [odd, others] :
       {std::pair(broadcast, scatter), std::pair(barrier, all_reduce), std::pair(reduced, all_reduce)}) {
    run([&, wrong = odd, right = others](Rank& r) {
      r.phase("all have joined");
      r.world->barrier();
      std::vector<float> x(100);
      const Caught caught = catch_error([&] {
        if (r.rank == 2) r.world->recv(buffer_of(x), 0);  // rank 0 sends after the collective
        r.rank == 1 ? wrong(r, x) : right(r, x);
      });
      EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
      EXPECT_TRUE(names_rank(caught.text, 0) && names_rank(caught.text, 1)) << caught;
      EXPECT_GE(caught.info.calls.size(), 2u) << caught;
      EXPECT_LT(caught.took, 5.0 * kSlowdown);
      expect_aborted_from_now_on(r);
    });
  }
}

// A rank that comes late is not an error, whatever the others wait for; neither is one that is ahead of them.
TEST_P(MismatchTest, NotWhereARankIsLate) {
  if (GetParam().n < 3) return;
  run([](Rank& r) {
    float x = 1, sum = 0;
    if (r.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // sleep: being late is tested
    for (int i = 0; i < 3; ++i) r.world->reduce(buffer_of(x), buffer_of(sum), 1);
    r.world->all_reduce(buffer_of(x));
    r.world->barrier();
    EXPECT_EQ(x, r.size);
  });
}

// A program ends when it gets an error, so the first rank that gets the Mismatch may be gone when the others look.
class MismatchThatEndsRanks : public EveryTransport {};
INSTANTIATE_TEST_SUITE_P(Faults, MismatchThatEndsRanks, process_transports(), transport_name);

TEST_P(MismatchThatEndsRanks, IsWhatAllRanksReport) {
  constexpr int kLast = 3;
  for (int turn = 0; turn < 6; ++turn) {
    run_ranks({.n = kLast + 1, .as = As::processes, .transport = GetParam(), .expect_dead = {0, 1, 2}}, [](Rank& r) {
      const auto path = [&r](int rank) { return r.dir() + "/error-of-" + std::to_string(rank); };
      r.phase("all have joined");
      r.world->barrier();
      std::vector<float> x(r.rank == 1 ? 1001 : 1000);
      const Caught caught = catch_error([&] { r.world->all_reduce(buffer_of(x)); });
      std::ofstream(path(r.rank)) << caught;
      if (r.rank != kLast) r.kill_self();
      r.phase("the others have ended");
      for (int rank = 0; rank < r.size; ++rank) {
        const std::string text = file_text(path(rank));
        EXPECT_TRUE(text.starts_with("Mismatch")) << "rank " << rank << ": " << text;
      }
    });
  }
}

}  // namespace
}  // namespace maniple::harness
