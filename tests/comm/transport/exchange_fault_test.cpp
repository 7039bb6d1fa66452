// What becomes of messages when the other side is lost, silent, wrong or corrupt.
#include <sys/socket.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>

#include "comm/transport/frame.h"
#include "comm/transport/mesh_world.h"
#include "comm/transport/sealed_channel.h"
#include "comm/transport/tcp_channel.h"

namespace maniple::test {
namespace {

using namespace std::chrono_literals;

Operation call_of(Op op, std::size_t count, std::uint64_t seq = 7) {
  Operation operation;
  operation.op = op;
  operation.dtype = DType::uint8;
  operation.count = count;
  operation.seq = seq;
  return operation;
}

template <class E>
E thrown_by(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const E& expected) {
    return expected;
  } catch (const std::exception& other) {
    ADD_FAILURE() << "another error: " << other.what();
    throw;
  }
  ADD_FAILURE() << "no error";
  throw std::runtime_error("no error");
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

/// Writes a given stretch of the stream slowly: one byte at a time, so that the reader sees every split.
class Trickle final : public ByteSink {
 public:
  explicit Trickle(std::unique_ptr<ByteSink> inner) : inner_(std::move(inner)) {}
  std::size_t write_some(std::span<const iovec> parts) override {
    const auto filled = std::find_if(parts.begin(), parts.end(), [](const iovec& part) { return part.iov_len > 0; });
    const iovec one{filled->iov_base, 1};
    return inner_->write_some({&one, 1});
  }
  int fd() const noexcept override { return inner_->fd(); }

 private:
  std::unique_ptr<ByteSink> inner_;
};

/// Flips one bit of the stream.
class Flip final : public ByteSink {
 public:
  Flip(std::unique_ptr<ByteSink> inner, std::size_t at) : inner_(std::move(inner)), at_(at) {}
  std::size_t write_some(std::span<const iovec> parts) override {
    std::vector<std::byte> bytes;
    for (const iovec& part : parts) {
      const auto* data = static_cast<const std::byte*>(part.iov_base);
      bytes.insert(bytes.end(), data, data + part.iov_len);
    }
    if (at_ >= done_ && at_ - done_ < bytes.size()) bytes[at_ - done_] ^= std::byte{0x10};
    const iovec all{bytes.data(), bytes.size()};
    const std::size_t moved = inner_->write_some({&all, 1});
    done_ += moved;
    return moved;
  }
  int fd() const noexcept override { return inner_->fd(); }

 private:
  std::unique_ptr<ByteSink> inner_;
  std::size_t at_;
  std::size_t done_ = 0;
};

/// Puts a decorated connection between ranks 0 and 1; the other end is a plain source.
template <class Decorate>
WorldOptions decorated(std::pair<UniqueFd, UniqueFd>& sockets, Decorate decorate) {
  WorldOptions options{.size = 2, .streams = 1};
  options.adjust = [&sockets, decorate](int rank, MeshOptions& mesh) {
    if (rank == 0)
      mesh.local_sink = [&sockets, decorate](int) { return decorate(make_tcp_sink(std::move(sockets.first))); };
    if (rank == 1) mesh.local_source = [&sockets](int) { return make_tcp_source(std::move(sockets.second)); };
  };
  return options;
}

/// The same in records, with the decoration below them.
template <class Decorate>
WorldOptions decorated_and_sealed(std::pair<UniqueFd, UniqueFd>& sockets, Decorate decorate) {
  WorldOptions options{.size = 2, .streams = 1};
  options.adjust = [&sockets, decorate](int rank, MeshOptions& mesh) {
    const ConnectionKeys keys = derive_keys(preferred_cipher(), TrafficSecret{}, "test", rank == 0);
    if (rank == 0) {
      mesh.local_sink = [&sockets, decorate, keys](int) {
        return make_sealed_sink(decorate(make_tcp_sink(std::move(sockets.first))), keys);
      };
    } else {
      mesh.local_source = [&sockets, keys](int) {
        return make_sealed_source(make_tcp_source(std::move(sockets.second)), keys);
      };
    }
  };
  return options;
}

TEST(ExchangeFaults, FramesSplitAtEveryByteArePutTogether) {
  auto sockets = tcp_pair();
  MeshWorld world(
      decorated(sockets, [](std::unique_ptr<ByteSink> sink) { return std::make_unique<Trickle>(std::move(sink)); }));
  const Operation operation = call_of(Op::send, 5);
  world.run([&](int rank) {
    Exchange exchange = world.exchange(rank, operation);
    std::string text = rank == 0 ? "hello" : "-----";
    for (int i = 0; i < 3; ++i) {
      if (rank == 0) exchange.send(1, std::as_bytes(std::span(text)));
      if (rank == 1) exchange.recv(0, std::as_writable_bytes(std::span(text)));
      exchange.wait_all();
      EXPECT_EQ(text, "hello");
    }
  });
}

TEST(ExchangeFaults, RecordsSplitAtEveryByteArePutTogether) {
  auto sockets = tcp_pair();
  MeshWorld world(decorated_and_sealed(
      sockets, [](std::unique_ptr<ByteSink> sink) { return std::make_unique<Trickle>(std::move(sink)); }));
  const Operation operation = call_of(Op::send, 5);
  world.run([&](int rank) {
    Exchange exchange = world.exchange(rank, operation);
    std::string text = rank == 0 ? "hello" : "-----";
    for (int i = 0; i < 3; ++i) {
      if (rank == 0) exchange.send(1, std::as_bytes(std::span(text)));
      if (rank == 1) exchange.recv(0, std::as_writable_bytes(std::span(text)));
      exchange.wait_all();
      EXPECT_EQ(text, "hello");
    }
  });
}

class Corruption : public ::testing::TestWithParam<std::size_t> {};

void expect_noticed(MeshWorld& world, const std::string& part);

TEST_P(Corruption, IsAnErrorThatNamesThePeerAndCompletesNothing) {
  auto sockets = tcp_pair();
  const std::size_t at = GetParam();
  MeshWorld world(
      decorated(sockets, [at](std::unique_ptr<ByteSink> sink) { return std::make_unique<Flip>(std::move(sink), at); }));
  expect_noticed(world, "");
}

TEST_P(Corruption, OfRecordsIsAnErrorToo) {
  auto sockets = tcp_pair();
  const std::size_t at = GetParam();
  MeshWorld world(decorated_and_sealed(
      sockets, [at](std::unique_ptr<ByteSink> sink) { return std::make_unique<Flip>(std::move(sink), at); }));
  expect_noticed(world, "authentic");
}

void expect_noticed(MeshWorld& world, const std::string& part) {
  constexpr std::size_t kSize = kPieceBytes + 1000;
  const Operation operation = call_of(Op::send, kSize);
  bool completed = false;
  const auto errors = world.run_each([&](int rank) {
    std::vector<std::byte> data(kSize, std::byte{0x5a});
    Exchange exchange = world.exchange(rank, operation);
    if (rank == 0) {
      exchange.send(1, data);
      exchange.wait_all();
    } else {
      exchange.wait(exchange.recv(0, data));
      completed = true;
    }
  });
  EXPECT_FALSE(completed);
  const std::string text = thrown_by<ProtocolError>(errors[1]).what();
  expect_contains(text, "rank 0");
  expect_contains(text, part);
}
// In the header's magic and length, in a piece's header, in the first and the last byte of a piece, in the last piece.
INSTANTIATE_TEST_SUITE_P(Places, Corruption,
                         ::testing::Values(0, 41, 64, 70, 76, 80, 80 + kPieceBytes - 1, 80 + kPieceBytes + 8,
                                           80 + kPieceBytes + 16 + 999));

TEST(ExchangeFaults, DifferentCallsAreAMismatchThatDescribesBoth) {
  MeshWorld world({.size = 3});
  const auto errors = world.run_each([&](int rank) {
    std::vector<std::byte> data(1000);
    Operation operation = call_of(rank == 2 ? Op::broadcast : Op::all_reduce, 1000);
    operation.in = operation.out = data.data();
    world.call(rank, find_mesh_algorithm(operation.op, "direct")->run, operation, Deadline::after(10s));
  });
  expect_contains(thrown_by<Mismatch>(errors[2]).what(), "this rank called broadcast #7");
  for (int rank = 0; rank < 2; ++rank) {
    const Mismatch error = thrown_by<Mismatch>(errors[static_cast<std::size_t>(rank)]);
    expect_contains(error.what(), "rank 2 called broadcast #7");
    expect_contains(error.what(), "this rank called all_reduce #7");
    const std::vector<RankCall>& calls = error.info().calls;
    ASSERT_TRUE(calls.size() == 2 && calls[0].rank == 2 && calls[1].rank == rank);
    EXPECT_TRUE(calls[0].call.starts_with("broadcast #7") && calls[1].call.starts_with("all_reduce #7"));
  }
}

// Every algorithm against every other operation: whatever two ranks call instead of the same, both get an error.
TEST(ExchangeFaults, EveryPairOfDifferentOperationsIsNoticedByBothRanks) {
  for (const MeshEntry& mine : mesh_algorithms()) {
    for (const MeshEntry& other : mesh_algorithms()) {
      if (mine.op == other.op) continue;
      MeshWorld world({.size = 2, .streams = 1});
      const auto errors = world.run_each([&](int rank) {
        std::vector<std::byte> in(2000);
        std::vector<std::byte> out(2000);
        const MeshEntry& entry = rank == 0 ? mine : other;
        Operation operation = call_of(entry.op, 1000);
        operation.in = in.data();
        operation.out = out.data();
        operation.parts = operation.in_parts = operation.out_parts = Parts(1000, 2);
        world.call(rank, entry.run, operation, Deadline::after(20s));
      });
      for (const auto& error : errors) {
        SCOPED_TRACE(std::string(to_string(mine.op)) + " against " + std::string(to_string(other.op)));
        thrown_by<Mismatch>(error);
      }
    }
  }
}

TEST(ExchangeFaults, DifferentLengthsAreAMismatchBeforeAByteIsWritten) {
  MeshWorld world({.size = 2});
  const Operation operation = call_of(Op::all_to_all, 0);
  const auto errors = world.run_each([&](int rank) {
    std::vector<std::byte> data(rank == 0 ? 200 : 100, std::byte{static_cast<unsigned char>(rank)});
    Exchange exchange = world.exchange(rank, operation);
    if (rank == 0) {
      exchange.send(1, data);
      exchange.wait_all();
      return;
    }
    try {
      exchange.wait(exchange.recv(0, std::span(data).first(50)));
    } catch (...) {
      EXPECT_EQ(std::count(data.begin(), data.end(), std::byte{1}), 100);
      throw;
    }
  });
  const std::string text = thrown_by<Mismatch>(errors[1]).what();
  expect_contains(text, "rank 0 sent 200 bytes");
  expect_contains(text, "expects 50");
}

TEST(ExchangeFaults, APeerThatEndsInTheMiddleOfAFrameIsLostByName) {
  MeshWorld world({.size = 2, .first_global_rank = 5});
  const Operation operation = call_of(Op::send, 1 << 20);
  constexpr std::size_t kSize = 64 << 20;  // far more than sockets hold
  std::promise<void> gone;
  const auto errors = world.run_each([&](int rank) {
    std::vector<std::byte> data(kSize);
    if (rank == 0) {
      {
        Exchange exchange = world.exchange(0, operation);
        exchange.send(1, data);
        exchange.progress();
      }
      world.drop(0);
      gone.set_value();
    } else {
      gone.get_future().wait();
      Exchange exchange = world.exchange(1, operation);
      exchange.wait(exchange.recv(0, data));
    }
  });
  EXPECT_EQ(errors[0], nullptr);
  const PeerLost lost = thrown_by<PeerLost>(errors[1]);
  EXPECT_EQ(lost.rank(), 5);
  expect_contains(lost.what(), "rank 0 (global rank 5) lost");
  expect_contains(lost.what(), "of 64.0 MiB received");
  EXPECT_EQ(lost.info().loss, LossKind::left_or_ended) << "over TCP both look alike";
  EXPECT_TRUE(lost.info().bytes_expected == kSize && lost.info().bytes_moved < kSize);
}

TEST(ExchangeFaults, ARingWhoseWriterEndsIsALostPeer) {
  MeshWorld world({.size = 2, .channel = Channel::ring});
  const Operation operation = call_of(Op::send, 10);
  const auto errors = world.run_each([&](int rank) {
    std::vector<std::byte> data(10);
    if (rank == 0) {
      {
        Exchange exchange = world.exchange(0, operation);
        exchange.send(1, data);
        exchange.wait_all();
      }
      world.drop(0);
    } else {
      Exchange exchange = world.exchange(1, operation);
      exchange.wait(exchange.recv(0, data));
      exchange.wait(exchange.recv(0, data));
    }
  });
  EXPECT_EQ(thrown_by<PeerLost>(errors[1]).rank(), 0);
  EXPECT_EQ(thrown_by<PeerLost>(errors[1]).info().loss, LossKind::left);
}

// Ranks that sleep at once, and ranks that do not sleep.
std::vector<WorldOptions> ways_to_wait(int size) {
  std::vector<WorldOptions> ways;
  for (const double spin_us : {0., 20e6}) {
    ways.push_back({.size = size, .channel = Channel::tcp});
    ways.back().adjust = [spin_us](int, MeshOptions& mesh) { mesh.waiting = WaitPolicy::for_sockets(1, 1, spin_us); };
  }
  ways.push_back({.size = size, .channel = Channel::ring});
  return ways;
}

TEST(ExchangeFaults, ASilentPeerIsATimeoutAtTheDeadlineThatNamesItAndTheProgress) {
  for (const WorldOptions& way : ways_to_wait(3)) {
    MeshWorld world(way);
    const Operation operation = call_of(Op::gather, 4000);
    std::promise<void> sent;
    world.run([&](int rank) {
      std::vector<std::byte> data(4000);
      if (rank == 2) return;
      if (rank == 1) {
        Exchange exchange = world.exchange(rank, operation);
        exchange.send(0, data);
        exchange.wait_all();
        return sent.set_value();
      }
      sent.get_future().wait();
      Exchange exchange = world.exchange(rank, operation, Deadline::after(300ms));
      exchange.recv(1, data);
      exchange.recv(2, data);
      try {
        exchange.wait_all();
        ADD_FAILURE() << "no error";
      } catch (const Timeout& error) {
        expect_contains(error.what(), "rank 2 (0 of 4000 B received");
        EXPECT_EQ(error.info().ranks, std::vector<int>{2});
        EXPECT_GE(error.info().waited_s, 0.29);
        EXPECT_LT(error.info().waited_s, 5);
        EXPECT_EQ(error.info().bytes_expected, 4000u);
        EXPECT_EQ(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
      }
    });
  }
}

TEST(ExchangeFaults, AnAbortWakesWaitersWithItsCause) {
  for (const WorldOptions& way : ways_to_wait(2)) {
    MeshWorld world(way);
    const Operation operation = call_of(Op::recv, 10);
    const auto began = std::chrono::steady_clock::now();
    std::promise<void> waiting;
    const auto errors = world.run_each([&](int rank) {
      if (rank == 0) {
        waiting.get_future().wait();
        world.abort(1).raise(std::make_exception_ptr(PeerLost("rank 9 lost", 9)));
        return;
      }
      std::vector<std::byte> data(10);
      Exchange exchange = world.exchange(1, operation);
      const auto ticket = exchange.recv(0, data);
      waiting.set_value();
      exchange.wait(ticket);
    });
    EXPECT_EQ(thrown_by<PeerLost>(errors[1]).rank(), 9);
    EXPECT_LT(std::chrono::steady_clock::now() - began, 10s);
  }
}

// When a rank gets to sleep, the time at which it wanted to look at its peers may be over.
TEST(Exchange, ADuePollDoesNotPreventWaiting) {
  ::setenv("MANIPLE_HEARTBEAT", "0.000001", 1);
  MeshWorld world(ways_to_wait(2)[0]);
  ::unsetenv("MANIPLE_HEARTBEAT");
  std::promise<void> waiting;
  world.run([&](int rank) {
    std::vector<std::byte> data(10);
    if (rank == 1) waiting.get_future().wait();
    Exchange exchange = world.exchange(rank, call_of(Op::send, 10));
    if (rank == 1) return exchange.wait(exchange.send(0, data));
    waiting.set_value();
    exchange.wait(exchange.recv(1, data));
  });
}

TEST(ExchangeFaults, AMeshThatFailedRefusesFurtherExchanges) {
  MeshWorld world({.size = 2});
  const Operation operation = call_of(Op::recv, 10);
  std::vector<std::byte> data(10);
  {
    Exchange exchange = world.exchange(0, operation, Deadline::after(1ms));
    exchange.recv(1, data);
    EXPECT_THROW(exchange.wait_all(), Timeout);
  }
  EXPECT_THROW(world.exchange(0, operation), Aborted);
}

TEST(Exchange, EarlyFramesWaitInTheChannelAndArriveInOrder) {
  for (const Channel channel : {Channel::tcp, Channel::ring}) {
    MeshWorld world({.size = 2, .channel = channel});
    std::promise<void> sent;
    world.run([&](int rank) {
      constexpr int kMessages = 20;
      for (int i = 0; i < kMessages; ++i) {
        Exchange exchange = world.exchange(rank, call_of(Op::send, 100, static_cast<std::uint64_t>(i)));
        std::vector<std::byte> data(100, std::byte{static_cast<unsigned char>(rank == 0 ? i : 99)});
        if (rank == 0) {
          exchange.send(1, data);
          exchange.wait_all();
        } else {
          if (i == 0) sent.get_future().wait();
          exchange.wait(exchange.recv(0, data));
          EXPECT_EQ(data[99], std::byte{static_cast<unsigned char>(i)});
        }
      }
      if (rank == 0) sent.set_value();
    });
  }
}

TEST(Exchange, ReceiverFollowsTheSendersNumberOfStreams) {
  WorldOptions options{.size = 2, .streams = 1};
  options.adjust = [](int rank, MeshOptions& mesh) { mesh.streams = rank == 0 ? 5 : 1; };
  MeshWorld world(options);
  world.run([&](int rank) {
    std::vector<std::byte> data(7 * kPieceBytes + 13);
    for (std::size_t i = 0; i < data.size() && rank == 0; ++i) data[i] = static_cast<std::byte>(i * i >> 7);
    Exchange exchange = world.exchange(rank, call_of(Op::send, data.size()));
    if (rank == 0) exchange.send(1, data);
    if (rank == 1) exchange.recv(0, data);
    exchange.wait_all();
    for (std::size_t i = 0; i < data.size(); ++i) ASSERT_EQ(data[i], static_cast<std::byte>(i * i >> 7)) << i;
  });
}

}  // namespace
}  // namespace maniple::test
