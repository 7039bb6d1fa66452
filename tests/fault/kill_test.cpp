// Fault 1: a rank is killed in the middle of an all_reduce. Every survivor gets an error at once that names it.
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <set>
#include <thread>

#include "comm/session/peer_dialer.h"
#include "fault/expect_error.h"
#include "fault/ways.h"

namespace maniple::harness {
namespace {

constexpr int kRanks = 8;
constexpr int kRepetitions = 5;

class Kill : public EveryTransport {
 protected:
  // Collects the time from the fault to each survivor's error.
  void note(const RunResult& result, int victim) {
    if (!result) return;
    EXPECT_EQ(result.ended[victim].signal, SIGKILL);
    const auto fault_at_s = result.numbers("fault_at");
    const auto noticed = result.numbers("noticed_at");
    EXPECT_EQ(noticed.size(), static_cast<std::size_t>(kRanks - 1));
    for (const auto& [rank, when] : noticed) times_.push_back(when - fault_at_s.at(victim));
    if (!result.texts("error").empty()) example_ = result.texts("error").begin()->second;
  }

  void judge(const char* name) {
    if (times_.empty()) return;
    std::sort(times_.begin(), times_.end());
    const auto percentile = [this](double p) { return times_[static_cast<std::size_t>(p * (times_.size() - 1))]; };
    std::printf("%s over %s: noticed after p50 %.1f ms, p99 %.1f ms, max %.1f ms (%zu survivors)\n  %s\n", name,
                std::string(to_string(GetParam())).c_str(), percentile(0.5) * 1e3, percentile(0.99) * 1e3,
                times_.back() * 1e3, times_.size(), example_.c_str());
    EXPECT_LT(percentile(0.5), 1.0) << "a heartbeat would tell it after 3 s";
    EXPECT_LT(times_.back(), 5.0) << "a machine with little time to spare may be late, but not by so much";
  }

 private:
  std::vector<double> times_;
  std::string example_;
};
INSTANTIATE_TEST_SUITE_P(Faults, Kill, process_transports(), transport_name);

void expect_loss_of(Rank& r, int victim, const Caught& caught) {
  r.report("noticed_at", now_s());
  r.report("error", caught.text);
  EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
  EXPECT_EQ(caught.lost_rank, victim) << caught;
  EXPECT_EQ(caught.info.loss, LossKind::failed) << caught;
  EXPECT_TRUE(names_call(caught.text, "all_reduce", r)) << caught;
  EXPECT_TRUE(names_rank(caught.text, victim)) << caught;
  EXPECT_EQ(caught.info.operation, "all_reduce");
  EXPECT_GT(caught.info.sequence, 0u);
  EXPECT_EQ(caught.info.group, "world");
  EXPECT_EQ(caught.info.rank, r.rank);
  EXPECT_EQ(caught.info.size, r.size);
  EXPECT_EQ(caught.info.ranks, std::vector<int>{victim});
  expect_aborted_from_now_on(r);
}

TEST_P(Kill, BeforeItsTurnOfAnAllReduce) {
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    const int victim = (3 * repetition + 2) % kRanks;
    const auto result = run_ranks(
        {.n = kRanks, .as = As::processes, .transport = GetParam(), .fault = kill_at(victim, 20)}, [victim](Rank& r) {
          std::vector<float> values(100'000, 1.0f);
          const Caught caught = catch_error([&] {
            for (;;) {
              r.step();
              r.world->all_reduce(buffer_of(values), ReduceOp::max);
            }
          });
          expect_loss_of(r, victim, caught);
        });
    note(result, victim);
  }
  judge("killed before");
}

// Ranks that only send go on without the dead one for a few operations at most.
TEST_P(Kill, TheRootOfReducesAndTheOthers) {
  for (const int victim : {0, 2}) {
    run_ranks({.n = 3, .as = As::processes, .transport = GetParam(), .fault = kill_at(victim, 20)}, [victim](Rank& r) {
      float x = 1, sum = 0;
      const Caught caught = catch_error([&] {
        for (int i = 0;; ++i) {
          r.step();
          if (i % 2 == 0) {
            r.world->reduce(buffer_of(x), buffer_of(sum), 0);
          } else {
            r.world->broadcast(buffer_of(x), 0);
          }
        }
      });
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_EQ(caught.lost_rank, victim) << caught;
      expect_aborted_from_now_on(r);
    });
  }
}

// What a rank sent before it left is used. (Over a network a sender waits for its root.)
TEST(KillInSharedMemory, ARankThatOnlySendsMayLeave) {
  run_ranks({.n = 3, .as = As::processes, .transport = TransportKind::shm}, [](Rank& r) {
    float x = static_cast<float>(r.rank + 1), sum = 0;
    r.world->barrier();
    if (r.rank == 0) r.phase("the others have left");
    r.world->reduce(buffer_of(x), buffer_of(sum), 0);
    if (r.rank == 0) {
      EXPECT_EQ(sum, 6);
      return;
    }
    r.world.reset();
    r.phase("the others have left");
  });
}

// At that moment its memory is read by the other, or it reads the other's.
TEST(KillInSharedMemory, WhileMemoryIsReadOutOfAProcess) {
  constexpr std::size_t kCount = 4'000'000;
  for (const Op op : {Op::broadcast, Op::gather, Op::all_gather}) {
    for (const int victim : {0, 1}) {
      RunOptions run{.n = 2, .as = As::processes, .transport = TransportKind::shm, .algorithm = "direct"};
      run.fault = kill_at(victim, 5);
      run_ranks(run, [op, victim](Rank& r) {
        std::vector<float> in(kCount, 1), out(2 * kCount);
        const Caught caught = catch_error([&] {
          for (;;) {
            const Work work = op == Op::broadcast ? r.world->broadcast(buffer_of(in), 0, {.async_op = true})
                              : op == Op::gather
                                  ? r.world->gather(buffer_of(in), buffer_of(out), 0, {}, {.async_op = true})
                                  : r.world->all_gather(buffer_of(in), buffer_of(out), {}, {.async_op = true});
            r.step();
            work.wait();
          }
        });
        EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
        EXPECT_EQ(caught.lost_rank, victim) << caught;
        EXPECT_TRUE(names_rank(caught.text, victim)) << caught;
        expect_aborted_from_now_on(r);
      });
    }
  }
}

TEST_P(Kill, InTheMiddleOfAnAllReduce) {
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    const int victim = (3 * repetition + 1) % kRanks;
    const auto result = run_ranks(
        {.n = kRanks, .as = As::processes, .transport = GetParam(), .fault = kill_at(victim, 1)}, [victim](Rank& r) {
          std::vector<float> values(8'000'000, 1.0f);
          r.phase("all have joined");
          const Caught caught = catch_error([&] {
            const Work work = r.world->all_reduce(buffer_of(values), ReduceOp::sum, {.async_op = true});
            r.step();
            work.wait();
            // It may have got through in time; then the next one cannot.
            r.world->all_reduce(buffer_of(values));
          });
          expect_loss_of(r, victim, caught);
        });
    note(result, victim);
  }
  judge("killed inside");
}

TEST_P(Kill, WhileOthersReceiveFromIt) {
  run_ranks({.n = 3, .as = As::processes, .transport = GetParam(), .fault = kill_at(1, 1)}, [](Rank& r) {
    r.world->barrier();
    r.phase("all have left the barrier");
    r.step();
    int value = 0;
    const Caught caught = catch_error([&] { r.world->recv(buffer_of(value), 1); });
    EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
    EXPECT_EQ(caught.lost_rank, 1);
    EXPECT_LT(caught.took, 5.0);
  });
}

// The leader of the failure detector is held up: the others see that the connections of the dead rank are closed long
// before it tells them why.
TEST(KillOverTcp, WhileTheLeaderIsHeldUp) {
  constexpr int kVictim = 1;
  RunOptions run{.n = 4, .as = As::processes, .transport = TransportKind::tcp};
  run.expect_dead = {kVictim};
  run_ranks(run, [](Rank& r) {
    r.world->barrier();
    r.phase("all have left the barrier");
    float value = 1;
    std::thread helper;
    if (r.rank == 2) {
      ASSERT_EQ(::kill(r.pid_of(0), SIGSTOP), 0);
      ASSERT_EQ(::kill(r.pid_of(kVictim), SIGKILL), 0);
      helper = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(600));  // sleep: the pause itself is the fault
        ::kill(r.pid_of(0), SIGCONT);
      });
    }
    const Caught caught = catch_error([&] {
      for (;;) r.world->all_reduce(buffer_of(value), ReduceOp::max);
    });
    if (helper.joinable()) helper.join();
    expect_loss_of(r, kVictim, caught);
  });
}

std::set<int> open_sockets() {
  constexpr int kMax = 1024;
  std::set<int> sockets;
  for (int fd = 0; fd < kMax; ++fd) {
    struct stat status{};
    if (::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) sockets.insert(fd);
  }
  return sockets;
}

// A process that ends closes one connection after the other: here the one to the leader is the last, by far.
TEST(KillOverTcp, AsksWhetherARankLivesWhoseConnectionsAreClosed) {
  RunOptions run{.n = 3, .as = As::processes, .transport = TransportKind::tcp};
  run.expect_dead = {1};
  run_ranks(run, [](Rank& r) {
    const auto before = open_sockets();
    const std::vector<int> members = {1, 2};
    const auto group = r.world->new_group(members);
    float value = 1;
    if (r.rank != 0) group->all_reduce(buffer_of(value));
    r.phase("ranks 1 and 2 are connected");
    if (r.rank == 1) {
      int closed = 0;
      for (const int socket : open_sockets()) {
        if (before.count(socket) == 0 && ::shutdown(socket, SHUT_RDWR) == 0) ++closed;
      }
      EXPECT_GT(closed, 0);
      r.stop_self();  // it does not answer
    } else if (r.rank == 0) {
      r.world->store().wait(std::vector<std::string>{"rank 2 waits"}, Deadline::after(std::chrono::seconds(20)));
      std::this_thread::sleep_for(std::chrono::milliseconds(600));  // sleep: the pause itself is the fault
      ::kill(r.pid_of(1), SIGKILL);
    } else {
      while (process_state(r.pid_of(1)) != 'T') std::this_thread::yield();  // until then it would reply
      r.world->store().set("rank 2 waits", "yes");
      const Caught caught = catch_error([&] { group->all_reduce(buffer_of(value)); });
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_EQ(caught.lost_rank, 1) << caught;
      EXPECT_EQ(caught.info.loss, LossKind::failed) << caught;
    }
    r.phase("rank 2 knows");
  });
}

TEST_P(Kill, IsNoticedByIdleRanksAtTheirNextCall) {
  run_ranks({.n = 4, .as = As::processes, .transport = GetParam(), .fault = kill_at(3, 1)}, [](Rank& r) {
    r.world->barrier();
    r.phase("all have left the barrier");
    r.step();
    r.phase("rank 3 is dead");
    const Caught caught = catch_error([&] { r.world->barrier(); });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::peer_lost, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(names_rank(caught.text, 3)) << caught;
    EXPECT_LT(caught.took, 5.0);
  });
}

TEST_P(Kill, OfARankOutsideASubGroupLeavesTheSubGroupAlone) {
  run_ranks({.n = 4, .as = As::processes, .transport = GetParam(), .fault = kill_at(3, 1)}, [](Rank& r) {
    const auto group = r.world->split(r.rank == 3 ? -1 : 0);
    r.world->barrier();
    r.phase("all have left the barrier");
    r.step();
    r.phase("rank 3 is dead");
    int value = 1;
    group->all_reduce(buffer_of(value));
    EXPECT_EQ(value, 3);
    EXPECT_EQ(group->error(), nullptr);
  });
}

}  // namespace
}  // namespace maniple::harness
