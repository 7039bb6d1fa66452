// Tests the harness itself, with ranks that do not communicate.
#include "harness/run_ranks.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>

#include "comm/base/unique_fd.h"
#include <maniple/comm/error.h>

namespace maniple::harness {
namespace {

class EveryMode : public testing::TestWithParam<As> {};
INSTANTIATE_TEST_SUITE_P(Harness, EveryMode, testing::Values(As::threads, As::processes, As::netns),
                         [](const auto& mode) { return std::string(to_string(mode.param)); });

TEST_P(EveryMode, RunsEachRankOnceAndReturnsReports) {
  const RunResult result = run_ranks({.n = 3, .as = GetParam(), .init = false}, [](Rank& r) {
    EXPECT_EQ(r.size, 3);
    r.report("square", r.rank * r.rank);
    r.report("name", "rank " + std::to_string(r.rank));
  });
  if (!result) return;
  EXPECT_EQ(result.numbers("square"), (std::map<int, double>{{0, 0}, {1, 1}, {2, 4}}));
  EXPECT_EQ(result.texts("name").at(2), "rank 2");
  for (const auto& ended : result.ended) EXPECT_TRUE(ended.finished);
}

TEST_P(EveryMode, SecondRunOfATestReachesTheSecondLambda) {
  for (int round = 0; round < 2; ++round) {
    const RunResult result =
        run_ranks({.n = 2, .as = GetParam(), .init = false}, [&](Rank& r) { r.report("round", round); });
    if (!result) continue;
    EXPECT_EQ(result.numbers("round"), (std::map<int, double>{{0, double(round)}, {1, double(round)}}));
  }
}

TEST_P(EveryMode, PhaseWaitsForAllRanks) {
  run_ranks({.n = 4, .as = GetParam(), .init = false}, [](Rank& r) {
    for (int i = 0; i < 20; ++i) {
      const std::string mark = r.dir() + "/mark";
      if (r.rank == i % r.size) {
        EXPECT_EQ(::mkdir((mark + std::to_string(i)).c_str(), 0700), 0);
      }
      r.phase("made");
      EXPECT_EQ(::access((mark + std::to_string(i)).c_str(), F_OK), 0) << i;
    }
  });
}

TEST_P(EveryMode, EnvironmentReachesTheRanks) {
  run_ranks({.n = 2, .as = GetParam(), .init = false, .env = {{"TEST_WORD", "xyzzy"}}},
            [](Rank&) { EXPECT_STREQ(std::getenv("TEST_WORD"), "xyzzy"); });
  EXPECT_EQ(is_child() ? nullptr : std::getenv("TEST_WORD"), nullptr);
}

TEST_P(EveryMode, ThrowAtEndsOneRankOnly) {
  const RunResult result = run_ranks({.n = 3, .as = GetParam(), .init = false, .fault = throw_at(1, 2)}, [](Rank& r) {
    r.step();
    r.step();
    r.phase("survivors");
    r.report("survived", 1);
  });
  if (!result) return;
  EXPECT_EQ(result.numbers("survived"), (std::map<int, double>{{0, 1}, {2, 1}}));
  EXPECT_FALSE(result.ended[1].finished);
}

// A failure on one rank must end a rank that would wait forever, and its text must name the failed rank. Failures are
// intercepted, so that this test passes when the inner test fails.
std::vector<std::string> failures_of(const RunOptions& options, const std::function<void(Rank&)>& body) {
  std::vector<std::string> texts;
  if (is_child()) {
    run_ranks(options, body);
    return texts;
  }
  testing::TestPartResultArray results;
  {
    testing::ScopedFakeTestPartResultReporter reporter(testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS,
                                                       &results);
    run_ranks(options, body);
  }
  for (int i = 0; i < results.size(); ++i) texts.emplace_back(results.GetTestPartResult(i).message());
  return texts;
}

TEST(Processes, FirstFailureEndsAllAndNamesItsRank) {
  const double start = now_s();
  const auto failures = failures_of({.n = 3, .as = As::processes, .init = false, .limit = Seconds(30)}, [](Rank& r) {
    if (r.rank == 1) FAIL() << "rank one is unhappy";
    r.phase("never reached by rank 1");
    for (;;) ::pause();
  });
  ASSERT_GE(failures.size(), 1u);
  EXPECT_NE(failures[0].find("rank 1: "), std::string::npos);
  EXPECT_NE(failures[0].find("rank one is unhappy"), std::string::npos);
  EXPECT_LT(now_s() - start, 10);
}

TEST(Processes, ExceptionIsReportedWithItsText) {
  const auto failures = failures_of({.n = 2, .as = As::processes, .init = false}, [](Rank& r) {
    if (r.rank == 0) throw PeerLost("peer 1 lost", 1);
  });
  ASSERT_GE(failures.size(), 1u);
  EXPECT_NE(failures[0].find("rank 0: threw PeerLost: peer 1 lost"), std::string::npos);
}

TEST(Processes, LimitEndsAHangAndSaysWhoHung) {
  const auto failures = failures_of({.n = 2, .as = As::processes, .init = false, .limit = Seconds(1)}, [](Rank& r) {
    if (r.rank == 1) {
      for (;;) ::pause();
    }
  });
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_NE(failures[0].find("rank 1 runs: harness_test in "), std::string::npos) << failures[0];
}

TEST(Processes, UnexpectedDeathIsAFailure) {
  const auto failures = failures_of({.n = 2, .as = As::processes, .init = false}, [](Rank& r) {
    if (r.rank == 1) r.kill_self();
  });
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_NE(failures[0].find("rank 1 was ended by signal 9"), std::string::npos);
}

TEST(Processes, LeftoversAreFailures) {
  const auto failures = failures_of({.n = 1, .as = As::processes, .init = false}, [](Rank&) {
    if (::fork() == 0) {
      for (;;) ::pause();
    }
    EXPECT_EQ(::mkdir((std::string(std::getenv("TMPDIR")) + "/litter").c_str(), 0700), 0);
  });
  ASSERT_EQ(failures.size(), 2u);
  EXPECT_NE(failures[0].find("left a process behind"), std::string::npos);
  EXPECT_NE(failures[1].find("litter"), std::string::npos);
}

TEST(Processes, KilledAndStoppedRanksAreNotWaitedFor) {
  for (const Fault& fault : {kill_at(2, 1), stop_at(2, 1), exit_at(2, 1)}) {
    const RunResult result = run_ranks({.n = 3, .as = As::processes, .init = false, .fault = fault}, [](Rank& r) {
      r.step();
      r.phase("survivors");
      r.report("survived", 1);
    });
    if (!result) continue;
    EXPECT_EQ(result.numbers("survived"), (std::map<int, double>{{0, 1}, {1, 1}}));
    EXPECT_EQ(result.ended[2].signal, fault.kind == Fault::Kind::exit ? 0 : SIGKILL);
    EXPECT_EQ(result.ended[2].exit_code, fault.kind == Fault::Kind::exit ? 7 : 0);
  }
}

TEST(Processes, EachRankIsAProcessWhosePidTheOthersKnow) {
  const RunResult result = run_ranks({.n = 3, .as = As::processes, .init = false}, [](Rank& r) {
    EXPECT_EQ(r.pid_of(r.rank), ::getpid());
    r.report("pid of 0", r.pid_of(0));
  });
  if (!result) return;
  const auto pids = result.numbers("pid of 0");
  EXPECT_EQ(pids.at(1), pids.at(0));
  EXPECT_EQ(pids.at(2), pids.at(0));
}

TEST(Threads, FailureOfOneRankEndsAPhaseOfAnother) {
  std::atomic<bool> rank_0_left{false};
  const auto failures = failures_of({.n = 3, .init = false}, [&](Rank& r) {
    if (r.rank == 1) throw std::runtime_error("unhappy");
    if (r.rank == 2) rank_0_left.wait(false);
    if (r.rank != 0) return;
    try {
      r.phase("rank 2 never arrives");
    } catch (...) {
      rank_0_left = true;
      rank_0_left.notify_all();
      throw;
    }
  });
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_NE(failures[0].find("rank 1 threw"), std::string::npos);
}

TEST(Netns, RanksOfDifferentHostsAreInDifferentNamespaces) {
  const RunResult result = run_ranks({.n = 4, .as = As::netns, .init = false, .hosts = 2}, [](Rank& r) {
    char name[64] = {};
    EXPECT_GT(::readlink("/proc/self/ns/net", name, sizeof name - 1), 0);
    r.report("namespace", name);
    EXPECT_EQ(r.host, r.rank / 2);
    EXPECT_EQ(r.host_addresses().size(), 2u);
  });
  if (!result) return;
  const auto names = result.texts("namespace");
  EXPECT_EQ(names.at(0), names.at(1));
  EXPECT_EQ(names.at(2), names.at(3));
  EXPECT_NE(names.at(0), names.at(2));
}

// A reachable host refuses a connection to an unused port at once; an unreachable host never replies.
bool is_heard(const std::string& address) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(9);
  EXPECT_EQ(::inet_pton(AF_INET, address.c_str(), &peer.sin_addr), 1);
  ::connect(fd.get(), reinterpret_cast<sockaddr*>(&peer), sizeof peer);
  pollfd answer = {fd.get(), POLLOUT, 0};
  return ::poll(&answer, 1, 500) == 1;
}

TEST(Netns, BlackholeSilencesAHost) {
  run_ranks({.n = 2, .as = As::netns, .init = false, .hosts = 2}, [](Rank& r) {
    const std::string other = r.host_addresses().at(1 - r.rank);
    EXPECT_TRUE(is_heard(other));
    r.phase("heard");
    if (r.rank == 0) r.blackhole(1);
    r.phase("cut");
    EXPECT_FALSE(is_heard(other));
  });
}

}  // namespace
}  // namespace maniple::harness
