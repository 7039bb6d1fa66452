// Point-to-point messages when something is in the way: an abort, a deadline, a size that does not fit, a slow
// connection.
#include "comm/transport/message_engine.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <mutex>
#include <numeric>

#include "comm/base/system_error.h"
#include "comm/transport/mesh_world.h"
#include <maniple/comm/options.h>

namespace maniple::test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

constexpr int kAnyone = -1;
constexpr double kSoon = 10;  // seconds; far below the 60 s that anything that hangs would take here

/// Engines of several ranks in this process, over TCP on loopback.
class Engines {
 public:
  explicit Engines(int size, Connector* connector_of_0 = nullptr) : board_(size) {
    for (int rank = 0; rank < size; ++rank) {
      connectors_.push_back(std::make_unique<TestConnector>(board_, rank));
      aborts_.push_back(std::make_unique<AbortSignal>());
      MessageEngineOptions options;
      options.topic = "test";
      options.rank = rank;
      options.global_ranks.resize(static_cast<std::size_t>(size));
      std::iota(options.global_ranks.begin(), options.global_ranks.end(), 0);
      options.connector = rank == 0 && connector_of_0 != nullptr ? connector_of_0 : connectors_.back().get();
      options.abort = aborts_.back().get();
      engines_.push_back(std::make_unique<MessageEngine>(std::move(options)));
    }
  }

  MessageEngine& of(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  void destroy(int rank) { engines_[static_cast<std::size_t>(rank)].reset(); }
  AbortSignal& abort(int rank) { return *aborts_[static_cast<std::size_t>(rank)]; }
  Board& board() { return board_; }

  std::shared_ptr<Message> start(int rank, const std::shared_ptr<Message>& message, bool background = true) {
    of(rank).start({&message, 1}, background);
    return message;
  }
  /// Starts the message, and waits for it.
  std::exception_ptr run(int rank, const std::shared_ptr<Message>& message) {
    start(rank, message, false);
    of(rank).drive(*message);
    return message->error;
  }

 private:
  Board board_;
  std::vector<std::unique_ptr<TestConnector>> connectors_;
  std::vector<std::unique_ptr<AbortSignal>> aborts_;
  std::vector<std::unique_ptr<MessageEngine>> engines_;
};

std::shared_ptr<Message> make(Op op, int peer, int tag, std::span<std::byte> data, Seconds limit = Seconds(60)) {
  auto message = std::make_shared<Message>();
  message->op = op;
  message->peer = peer;
  message->tag = tag;
  message->data = data.data();
  message->bytes = data.size();
  message->deadline = Deadline::after(limit);
  message->since = Deadline::Clock::now();
  return message;
}
auto send_to(int peer, int tag, std::span<std::byte> data, Seconds limit = Seconds(60)) {
  return make(Op::send, peer, tag, data, limit);
}
auto recv_from(int peer, int tag, std::span<std::byte> data, Seconds limit = Seconds(60)) {
  return make(Op::recv, peer, tag, data, limit);
}

/// Returns its fields.
template <class E>
ErrorInfo expect_error(const std::exception_ptr& error, const std::string& part) {
  EXPECT_NE(error, nullptr);
  try {
    if (error) std::rethrow_exception(error);
  } catch (const E& caught) {
    EXPECT_THAT(caught.what(), HasSubstr(part));
    return caught.info();
  } catch (const std::exception& other) {
    ADD_FAILURE() << "another error: " << other.what();
  }
  return {};
}

double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

/// Some bytes at the end of a page; whoever reads beyond them meets a page that cannot be read.
class AtPageEnd {
 public:
  AtPageEnd()
      : memory_(static_cast<std::byte*>(
            ::mmap(nullptr, 2 * page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    if (memory_ == MAP_FAILED || ::mprotect(memory_ + page(), page(), PROT_NONE) != 0) throw_system_error("mmap");
  }
  ~AtPageEnd() { ::munmap(memory_, 2 * page()); }
  std::span<std::byte> last(std::size_t bytes) { return {memory_ + page() - bytes, bytes}; }

 private:
  static std::size_t page() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }
  std::byte* memory_;
};

/// Keeps a descriptor of the connection that it made last.
class Keeping final : public Connector {
 public:
  SecureConnection dial(int global_rank, const std::string& topic, Deadline deadline,
                        const AbortSignal& abort) override {
    SecureConnection connection = TestConnector(*board, 0).dial(global_rank, topic, deadline, abort);
    const std::lock_guard lock(mutex_);
    kept_ = UniqueFd(::dup(connection.get()));
    return connection;
  }
  SecureConnection try_take(int global_rank, const std::string& topic) override {
    return board->take(global_rank, 0, topic);
  }
  int arrival_fd() const noexcept override { return board->arrival_fd(0); }
  /// Bytes that were written to it and that the other end's system does not have yet.
  int on_the_way() {
    int bytes = 0;
    const std::lock_guard lock(mutex_);
    if (::ioctl(kept_.get(), TIOCOUTQ, &bytes) != 0) throw_system_error("ioctl");
    return bytes;
  }

  Board* board = nullptr;

 private:
  std::mutex mutex_;
  UniqueFd kept_;
};

TEST(MessageEngine, NothingMovesAfterAnAbort) {
  Keeping connector;
  Engines engines(2, &connector);
  connector.board = &engines.board();
  std::vector<std::byte> large(64 << 20), sink(64 << 20);
  // Half way: the sockets are full, because the other side does not read.
  const auto first = engines.start(0, send_to(1, 0, large));
  SecureConnection other_end;
  while (!other_end) other_end = engines.board().take(0, 1, "test");
  engines.abort(0).raise(std::make_exception_ptr(Aborted("enough")));
  engines.of(0).drive(*first);
  expect_error<Aborted>(first->error, "enough");
  // Now there is room again; a message that was handed to the engine when the group was aborted must not use it.
  for (bool all = false, empty = false; !all || !empty;) {
    all = connector.on_the_way() == 0;
    empty = ::recv(other_end.get(), sink.data(), sink.size(), MSG_DONTWAIT) <= 0;
  }
  AtPageEnd small;
  expect_error<Aborted>(engines.run(0, send_to(1, 0, small.last(16))), "enough");
  expect_error<Aborted>(engines.run(0, recv_from(1, 0, small.last(16))), "enough");
  EXPECT_LE(::recv(other_end.get(), sink.data(), sink.size(), MSG_DONTWAIT), 0) << "bytes that were not sent";
}

TEST(MessageEngine, ABufferedMessageOfAnotherSizeFailsTheReceiveFromAnyone) {
  Engines engines(3);
  std::vector<std::byte> eight(8), four(4);
  ASSERT_EQ(engines.run(1, send_to(0, 1, eight)), nullptr);
  ASSERT_EQ(engines.run(1, send_to(0, 2, four)), nullptr);
  ASSERT_EQ(engines.run(0, recv_from(1, 2, four)), nullptr);  // the other is buffered
  const ErrorInfo info = expect_error<Mismatch>(engines.run(0, recv_from(kAnyone, 1, four)),
                                                "rank 1 sent uint8[8] with tag 1 where uint8[4] is received");
  EXPECT_EQ(info.calls, (std::vector<RankCall>{{.rank = 1, .call = "send uint8[8] tag 1"},
                                               {.rank = 0, .call = "recv uint8[4] tag 1"}}));
}

TEST(MessageEngine, AMessageOfAnotherSizeFailsTheReceiveFromAnyone) {
  Engines engines(3);
  std::vector<std::byte> eight(8), four(4);
  ASSERT_EQ(engines.run(1, send_to(0, 1, eight)), nullptr);
  const auto start = Deadline::Clock::now();
  expect_error<Mismatch>(engines.run(0, recv_from(kAnyone, 1, four)),
                         "rank 1 sent uint8[8] with tag 1 where uint8[4] is received");
  EXPECT_LT(seconds_since(start), kSoon);
}

TEST(MessageEngine, AReceiveFromAnyoneFailsWhenAllOthersAreLost) {
  Engines engines(3);
  std::vector<std::byte> four(4);
  for (const int rank : {1, 2}) {
    ASSERT_EQ(engines.run(rank, send_to(0, 1, four)), nullptr);
    ASSERT_EQ(engines.run(0, recv_from(rank, 1, four)), nullptr);
  }
  const auto received = engines.start(0, recv_from(kAnyone, 1, four));
  engines.destroy(1);
  engines.destroy(2);
  const auto start = Deadline::Clock::now();
  engines.of(0).drive(*received);
  EXPECT_EQ(expect_error<PeerLost>(received->error, "lost").loss, LossKind::left_or_ended) << "over TCP";
  EXPECT_LT(seconds_since(start), kSoon);
}

TEST(MessageEngine, ASendKeepsItsDeadlineBehindAnother) {
  Engines engines(2);
  std::vector<std::byte> large(64 << 20), behind(1 << 20);  // too large to be copied aside
  const auto before = engines.start(0, send_to(1, 0, large));
  const auto start = Deadline::Clock::now();
  const ErrorInfo info = expect_error<Timeout>(engines.run(0, send_to(1, 1, behind, Seconds(0.3))),
                                               " s: 0 of 1048576 bytes sent to rank 1, behind 1 earlier send");
  EXPECT_EQ(info.ranks, std::vector<int>{1});
  EXPECT_GE(info.waited_s, 0.3);
  EXPECT_EQ(info.bytes_moved, 0u);
  EXPECT_EQ(info.bytes_expected, behind.size());
  EXPECT_LT(seconds_since(start), kSoon);
  // The connection is not harmed: what was ahead arrives.
  EXPECT_FALSE(before->done.load());
  std::vector<std::byte> in(large.size());
  EXPECT_EQ(engines.run(1, recv_from(0, 0, in)), nullptr);
  engines.of(0).drive(*before);
  EXPECT_EQ(before->error, nullptr);
}

TEST(MessageEngine, AReceiveKeepsItsDeadlineWhileOthersMove) {
  Engines engines(3);
  std::vector<std::byte> out(1 << 20), in(1 << 20), four(4);
  std::atomic<bool> stop{false};
  const auto flow = std::async(std::launch::async, [&] {
    while (!stop) {
      const auto sent = engines.start(1, send_to(0, 0, out));
      engines.run(0, recv_from(1, 0, in));
      engines.of(1).drive(*sent);
    }
  });
  const auto start = Deadline::Clock::now();
  const ErrorInfo info = expect_error<Timeout>(engines.run(0, recv_from(2, 1, four, Seconds(0.3))),
                                               " s: 0 of 4 bytes received from rank 2");
  EXPECT_EQ(info.ranks, std::vector<int>{2});
  EXPECT_LT(seconds_since(start), kSoon);
  stop = true;
}

/// Connections to rank 1 are never made; those to others at once.
class Unreachable final : public Connector {
 public:
  SecureConnection dial(int global_rank, const std::string& topic, Deadline deadline,
                        const AbortSignal& abort) override {
    if (global_rank != 1) return TestConnector(*board, 0).dial(global_rank, topic, deadline, abort);
    pollfd waiting{abort.fd(), POLLIN, 0};
    ::poll(&waiting, 1, deadline.poll_ms());
    abort.check();
    throw Timeout("no answer");
  }
  SecureConnection try_take(int global_rank, const std::string& topic) override {
    return board->take(global_rank, 0, topic);
  }
  int arrival_fd() const noexcept override { return board->arrival_fd(0); }

  Board* board = nullptr;
};

TEST(MessageEngine, NoMessageWaitsForTheConnectionOfAnother) {
  Unreachable connector;
  Engines engines(3, &connector);
  connector.board = &engines.board();
  std::vector<std::byte> four(4), in(4);
  const auto stuck = engines.start(0, send_to(1, 0, four));
  const auto start = Deadline::Clock::now();
  EXPECT_EQ(engines.run(0, send_to(2, 0, four)), nullptr);
  EXPECT_EQ(engines.run(2, recv_from(0, 0, in)), nullptr);
  EXPECT_EQ(engines.run(2, send_to(0, 0, four)), nullptr);
  EXPECT_EQ(engines.run(0, recv_from(2, 0, in)), nullptr);
  expect_error<Timeout>(engines.run(0, send_to(1, 1, four, Seconds(0.3))),
                        " s: 0 of 4 bytes sent to rank 1, not connected yet, behind 1 earlier send");
  engines.destroy(0);
  EXPECT_LT(seconds_since(start), kSoon);
  expect_error<Aborted>(stuck->error, "the group was destroyed");
}

}  // namespace
}  // namespace maniple::test
