// send, recv, isend, irecv, batches: matched by (source, tag) in the order posted.
#include <numeric>
#include <set>
#include <thread>

#include <fmt/format.h>

#include "comm/group/matrix.h"
#include "comm/group/pattern.h"
#include <maniple/comm/error.h>

namespace maniple::harness {
namespace {

class PointToPointTest : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, PointToPointTest, testing::ValuesIn(places({2, 3, 4, 5, 6, 7, 8, 9, 16})), name_of);

TEST_P(PointToPointTest, RingOfEveryDtypeAndCount) {
  run([](Rank& r) {
    Arena arena(r, largest_count() * 8);
    const int next = (r.rank + 1) % r.size;
    const int previous = (r.rank + r.size - 1) % r.size;
    int number = 0;
    for (const std::size_t count : counts()) {
      for (const DType dtype : kAllDTypes) {
        const Manner manner = Manner::of(number++);
        SCOPED_TRACE(fmt::format("{} count {} {}", maniple::to_string(dtype), count, manner.describe()));
        const Buffer out = arena.take(0, manner.memory, dtype, count);
        const Buffer in = arena.take(1, manner.memory, dtype, count);
        Pattern::noise(dtype, r.rank).fill(out.data, count);
        // Rank 0 sends first and the others receive first, so that even a send that waits for its receiver passes on.
        if (manner.async) {
          const Work sent = r.world->isend(out, next, number);
          int source = -1;
          r.world->irecv(in, previous, number, &source).synchronize();
          sent.synchronize();
          EXPECT_EQ(source, previous);
        } else if (r.rank == 0) {
          r.world->send(out, next, number);
          EXPECT_EQ(r.world->recv(in, previous, number), previous);
        } else {
          EXPECT_EQ(r.world->recv(in, previous, number), previous);
          r.world->send(out, next, number);
        }
        synchronize_device();
        EXPECT_TRUE(Pattern::noise(dtype, previous).matches(in.data, count));
        EXPECT_TRUE(arena.guards_intact());
      }
    }
  });
}

TEST_P(PointToPointTest, AnySourceReceivesFromEveryone) {
  run([](Rank& r) {
    for (int round = 0; round < 3; ++round) {
      if (r.rank == 0) {
        std::set<int> sources;
        for (int i = 1; i < r.size; ++i) {
          int value = -1;
          const int source = r.world->recv(buffer_of(value), kAnySource, round);
          EXPECT_EQ(value, 100 * round + source);
          sources.insert(source);
        }
        EXPECT_EQ(sources.size(), static_cast<std::size_t>(r.size - 1));
      } else {
        const int value = 100 * round + r.rank;
        r.world->send(buffer_of(value), 0, round);
      }
    }
  });
}

TEST_P(PointToPointTest, AnySourceWaitsForALateSender) {
  run([](Rank& r) {
    if (r.rank == 0) {
      double value = 0;
      int source = -1;
      const Work received = r.world->irecv(buffer_of(value), kAnySource, 9, &source);
      EXPECT_FALSE(received.done());
      r.phase("posted");
      received.synchronize();
      EXPECT_EQ(source, r.size - 1);
      EXPECT_EQ(value, 2.5);
    } else {
      r.phase("posted");
      const double value = 2.5;
      if (r.rank == r.size - 1) r.world->send(buffer_of(value), 0, 9);
    }
  });
}

TEST_P(PointToPointTest, TagsAreMatchedOutOfOrderAndEqualTagsInOrder) {
  run([](Rank& r) {
    constexpr int kTags = 8;
    if (r.rank == 1) {
      for (int copy = 0; copy < 2; ++copy) {
        for (int tag = 0; tag < kTags; ++tag) {
          const int value = 10 * tag + copy;
          r.world->send(buffer_of(value), 0, tag);
        }
      }
    } else if (r.rank == 0) {
      for (int tag = kTags - 1; tag >= 0; --tag) {
        for (int copy = 0; copy < 2; ++copy) {
          int value = -1;
          r.world->recv(buffer_of(value), 1, tag);
          EXPECT_EQ(value, 10 * tag + copy);
        }
      }
    }
  });
}

TEST_P(PointToPointTest, SendMayComeBeforeAndAfterItsReceive) {
  run([](Rank& r) {
    if (r.rank > 1) return;
    const int peer = 1 - r.rank;
    for (int round = 0; round < 10; ++round) {
      const bool send_first = round % 2 == 0;
      std::vector<std::int32_t> values(5000, r.rank == 0 ? round : -1);
      Work work;
      if (r.rank == (send_first ? 0 : 1)) {
        work = r.rank == 0 ? r.world->isend(buffer_of(values), peer, 5) : r.world->irecv(buffer_of(values), peer, 5);
        r.world->send({}, peer, 6);  // tells the other that the first half is posted
      } else {
        r.world->recv({}, peer, 6);
        work = r.rank == 0 ? r.world->isend(buffer_of(values), peer, 5) : r.world->irecv(buffer_of(values), peer, 5);
      }
      work.synchronize();
      EXPECT_EQ(values, std::vector<std::int32_t>(5000, round));
    }
  });
}

// Small messages go another way in shared memory than large ones: they must not overtake each other. 40 are sent before
// the first is received, more than there are slots for small ones.
TEST_P(PointToPointTest, MessagesOfAllSizesStayInOrder) {
  run([](Rank& r) {
    if (r.rank > 1) return;
    constexpr std::size_t kSizes[] = {0, 1, 12, 13, 100, 1260, 1261, 1300, 5000, 1, 20'000};
    constexpr int kMessages = 200;
    const auto count_of = [&](int i) {
      return i < 40 ? static_cast<std::size_t>(i % 13) : kSizes[i % std::size(kSizes)];
    };
    std::vector<std::vector<std::int32_t>> out;
    for (int i = 0; i < kMessages; ++i) out.emplace_back(count_of(i), i);
    if (r.rank == 1) {
      std::vector<Work> works;
      for (int i = 0; i < kMessages; ++i) {
        if (i == 40) r.world->send({}, 0, 1);
        if (i % 7 == 3) {
          works.push_back(r.world->isend(buffer_of(out[i]), 0, 2));
        } else {
          r.world->send(buffer_of(out[i]), 0, 2);
        }
      }
      for (const Work& work : works) work.synchronize();
    } else {
      r.world->recv({}, 1, 1);
      for (int i = 0; i < kMessages; ++i) {
        std::vector<std::int32_t> in(count_of(i), -1);
        if (i % 5 == 2) {
          r.world->irecv(buffer_of(in), 1, 2).synchronize();
        } else {
          r.world->recv(buffer_of(in), i % 3 == 0 ? kAnySource : 1, 2);
        }
        ASSERT_EQ(in, out[i]) << "message " << i;
      }
    }
  });
}

// More than a ring, or the buffers of two sockets, hold.
std::vector<std::uint8_t> large_message(Rank& r) {
  const bool rings = r.world->topology().node_count() == 1 && r.world->transport() != "tcp";
  return std::vector<std::uint8_t>(rings && !with_plugin() ? 300'000 : 16 << 20, static_cast<std::uint8_t>(r.rank + 1));
}

TEST_P(PointToPointTest, SmallSendsDoNotWaitBehindALargeIsend) {
  run([](Rank& r) {
    if (r.rank > 1) return;
    const int peer = 1 - r.rank;
    const std::vector<std::uint8_t> out = large_message(r);
    for (const bool small_first : {false, true}) {
      std::vector<std::uint8_t> in(out.size());
      const Work sent = r.world->isend(buffer_of(out), peer, 1);
      for (int i = 0; i < 20; ++i) r.world->send(buffer_of(i), peer, i % 2 + 1);  // half of them with the same tag
      const auto receive_large = [&] {
        r.world->recv(buffer_of(in), peer, 1);
        EXPECT_TRUE(in == std::vector<std::uint8_t>(in.size(), static_cast<std::uint8_t>(peer + 1)));
      };
      const auto receive_small = [&](int tag) {
        for (int i = tag - 1; i < 20; i += 2) {
          int value = -1;
          r.world->recv(buffer_of(value), peer, tag);
          EXPECT_EQ(value, i);
        }
      };
      if (small_first) receive_small(2);
      receive_large();
      receive_small(1);
      if (!small_first) receive_small(2);
      sent.synchronize();
    }
  });
}

// The copies that the engine makes of small sends do not go with it.
TEST_P(PointToPointTest, WhatWasSentBehindALargeIsendArrivesAfterTheRankLeft) {
  run([](Rank& r) {
    auto pair = r.world->split(r.rank < 2 ? 0 : 1);
    const std::vector<std::uint8_t> out = r.rank < 2 ? large_message(r) : std::vector<std::uint8_t>();
    if (r.rank == 0) {
      const Work sent = pair->isend(buffer_of(out), 1, 1);
      for (int i = 0; i < 20; ++i) pair->send(buffer_of(i), 1, 2);
      sent.synchronize();
      pair.reset();
    }
    std::vector<std::uint8_t> in(out.size());
    if (r.rank == 1) pair->recv(buffer_of(in), 0, 1);
    r.phase("rank 0 has left the pair");
    for (int i = 0, value = -1; r.rank == 1 && i < 20; ++i) {
      pair->recv(buffer_of(value), 0, 2);
      EXPECT_EQ(value, i);
    }
  });
}

TEST_P(PointToPointTest, AnUnreceivedIsendFailsAtItsLimit) {
  run([](Rank& r) {
    if (r.rank > 1) return;
    const int peer = 1 - r.rank;
    const std::vector<std::uint8_t> out = large_message(r);
    const int value = 1;
    // All calls: a rank that is late finds its peer's message failed, or its peer gone.
    EXPECT_THROW(
        {
          const Work sent = r.world->isend(buffer_of(out), peer, 1, {.timeout = std::chrono::milliseconds(300)});
          if (r.rank == 0) r.world->send(buffer_of(value), peer, 2);
          sent.synchronize();
        },
        Error);
  });
}

TEST_P(PointToPointTest, WhatWasSentBeforeARankLeftArrives) {
  run([](Rank& r) {
    r.phase("joined");  // rank 0 aborts the group below, which must not reach a rank that is still in init()
    if (r.rank > 1) return;
    int value = -1;
    if (r.rank == 0) {
      r.world->recv(buffer_of(value), 1, 1);  // so that both ends are there
      r.world->send(buffer_of(value), 1, 1);
      for (int i = 0; i < 20; ++i) {
        r.world->recv(buffer_of(value), 1, 2);
        EXPECT_EQ(value, i);
      }
      EXPECT_THROW(r.world->recv(buffer_of(value), 1, 2), PeerLost);
    } else {
      r.world->send(buffer_of(value), 0, 1);
      r.world->recv(buffer_of(value), 0, 1);
      for (int i = 0; i < 20; ++i) r.world->send(buffer_of(i), 0, 2);
    }
  });
}

TEST_P(PointToPointTest, BatchExchangesAllWithAll) {
  run([](Rank& r) {
    for (const std::size_t count : {std::size_t{1}, largest_count() / 4}) {
      const std::size_t n = r.size;
      std::vector<float> out(count * n), in(count * n);
      std::vector<PointToPoint> operations;
      for (int peer = 0; peer < r.size; ++peer) {
        if (peer == r.rank) continue;
        std::fill_n(out.begin() + count * peer, count, static_cast<float>(100 * r.rank + peer));
        // Sends before receives on even ranks, the other way round on odd ones.
        const auto send = PointToPoint::send({out.data() + count * peer, count, DType::float32}, peer, 3);
        const auto recv = PointToPoint::recv({in.data() + count * peer, count, DType::float32}, peer, 3);
        operations.push_back(r.rank % 2 == 0 ? send : recv);
        operations.push_back(r.rank % 2 == 0 ? recv : send);
      }
      const auto works = r.world->batch_isend_irecv(operations);
      ASSERT_EQ(works.size(), operations.size());
      for (const Work& work : works) work.synchronize();
      for (int peer = 0; peer < r.size; ++peer) {
        if (peer == r.rank) continue;
        EXPECT_EQ(in[count * peer], static_cast<float>(100 * peer + r.rank));
        EXPECT_EQ(in[count * peer + count - 1], static_cast<float>(100 * peer + r.rank));
      }
    }
  });
}

TEST_P(PointToPointTest, BigMessagesBothWaysAtOnce) {
  run([](Rank& r) {
    const std::size_t count = kSanitized ? 100'000 : 2'000'003;
    const int peer = r.rank ^ 1;
    if (peer >= r.size) return;
    std::vector<float> out(count), in(count);
    std::iota(out.begin(), out.end(), static_cast<float>(r.rank));
    const Work sent = r.world->isend(buffer_of(out), peer);
    EXPECT_EQ(r.world->recv(buffer_of(in), peer), peer);
    sent.synchronize();
    std::iota(out.begin(), out.end(), static_cast<float>(peer));
    EXPECT_EQ(in, out);
  });
}

// Also where no other rank shares memory with this one, as nothing then wakes it but itself.
void receive_from_oneself(Rank& r) {
  int in = -1;
  const int out = 7;
  const Work received = r.world->irecv(buffer_of(in), r.rank, 3);
  EXPECT_FALSE(received.done());
  r.world->send(buffer_of(out), r.rank, 3);
  received.synchronize();
  EXPECT_EQ(in, 7);
  // The same with a receive that waits in another thread.
  std::thread waiting([&] { EXPECT_EQ(r.world->recv(buffer_of(in), kAnySource, 4), r.rank); });
  const std::vector<double> large(100'000, 1.5);  // more than the ring takes
  std::vector<double> copy(large.size());
  const Work sent = r.world->isend(buffer_of(large), r.rank, 5);
  r.world->recv(buffer_of(copy), r.rank, 5);
  sent.synchronize();
  EXPECT_EQ(copy, large);
  r.world->send(buffer_of(out), r.rank, 4);
  waiting.join();
  EXPECT_EQ(in, 7);
  r.phase("all have received");  // after the others have left, no rank waits for another
}

TEST_P(PointToPointTest, ReceiveFromOneselfMayComeBeforeTheSend) { run(receive_from_oneself); }

TEST(PointToPointOfOne, ReceiveFromOneselfMayComeBeforeTheSend) {
  for (const auto transport : {TransportKind::automatic, TransportKind::tcp}) {
    run_ranks({.n = 1, .as = chosen_as() == As::netns ? As::processes : chosen_as(), .transport = transport},
              receive_from_oneself);
  }
}

TEST_P(PointToPointTest, AreExemptFromTheOrderOfCollectives) {
  run([](Rank& r) {
    // Rank 0 sends before its all_reduce, rank 1 receives after its own.
    int value = r.rank == 0 ? 42 : -1;
    int sum = 1;
    if (r.rank == 0) r.world->send(buffer_of(value), 1);
    r.world->all_reduce(buffer_of(sum));
    if (r.rank == 1) r.world->recv(buffer_of(value), 0);
    EXPECT_EQ(sum, r.size);
    if (r.rank <= 1) {
      EXPECT_EQ(value, 42);
    }
  });
}

TEST_P(PointToPointTest, ManyInFlight) {
  run([](Rank& r) {
    constexpr int kMessages = 200;
    const int next = (r.rank + 1) % r.size;
    const int previous = (r.rank + r.size - 1) % r.size;
    std::vector<std::int64_t> out(kMessages), in(kMessages, -1);
    std::vector<Work> works;
    for (int i = 0; i < kMessages; ++i) {
      out[i] = 1000 * r.rank + i;
      works.push_back(r.world->irecv(buffer_of(in[i]), previous, i % 5));
      works.push_back(r.world->isend(buffer_of(out[i]), next, i % 5));
    }
    for (const Work& work : works) work.synchronize();
    for (int i = 0; i < kMessages; ++i) EXPECT_EQ(in[i], 1000 * previous + i);
  });
}

}  // namespace
}  // namespace maniple::harness
