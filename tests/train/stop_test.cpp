// Stopping early and in good order: signals, ranks that agree, and a job that is ended by SIGTERM and goes on in a new
// one.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <thread>

#include "comm/base/format.h"
#include "harness/run_ranks.h"
#include "harness/temporary_directory.h"
#include "launch/launched.h"
#include <maniple/dist.h>
#include <maniple/train/stop.h>

namespace maniple::harness::stop_test {
namespace {

// ---- Signals --------------------------------------------------------------------------------------------------------

volatile std::sig_atomic_t others_calls = 0;
void others_handler(int) { others_calls = others_calls + 1; }

/// The handler of a signal, put back at the end.
class Handler {
 public:
  Handler(int number, void (*handler)(int)) : number_(number), before_(std::signal(number, handler)) {}
  ~Handler() { std::signal(number_, before_); }
  Handler(const Handler&) = delete;
  Handler& operator=(const Handler&) = delete;

 private:
  int number_;
  void (*before_)(int);
};

TEST(GracefulStop, ASignalSetsAFlagAndHandlersAreRestored) {
  const Handler term(SIGTERM, others_handler);
  const Handler interrupt(SIGINT, others_handler);
  others_calls = 0;
  {
    GracefulStop stop;
    EXPECT_FALSE(stop.requested());
    EXPECT_FALSE(stop.requested_anywhere());
    EXPECT_EQ(stop.signal(), 0);
    // Two at once, as when a launcher passes on what the terminal has sent already: not the second one yet.
    sigset_t both, before;
    ::sigemptyset(&both);
    ::sigaddset(&both, SIGTERM);
    ::sigaddset(&both, SIGINT);
    ::pthread_sigmask(SIG_BLOCK, &both, &before);
    ASSERT_EQ(::raise(SIGTERM), 0);
    ASSERT_EQ(::raise(SIGINT), 0);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    EXPECT_TRUE(stop.requested());
    EXPECT_TRUE(stop.requested_anywhere());
    EXPECT_TRUE(stop.requested_anywhere()) << "and remains so";
    EXPECT_TRUE(stop.signal() == SIGTERM || stop.signal() == SIGINT) << stop.signal();
    EXPECT_THROW(GracefulStop(), InvalidArgument) << "one at a time";
    EXPECT_TRUE(stop.requested()) << "which changed nothing";
  }
  EXPECT_EQ(others_calls, 0);
  ASSERT_EQ(::raise(SIGTERM), 0);
  EXPECT_EQ(others_calls, 1);
  GracefulStop fresh;
  EXPECT_FALSE(fresh.requested()) << "the signal of an earlier one is forgotten";
}

TEST(GracefulStop, IgnoredSignalsStayIgnored) {
  const Handler ignored(SIGINT, SIG_IGN);
  GracefulStop stop;
  ASSERT_EQ(::raise(SIGINT), 0);
  EXPECT_FALSE(stop.requested());
}

TEST(GracefulStop, AHandlerOfOthersIsLeftAlone) {
  const Handler usual(SIGUSR2, SIG_DFL);
  {
    GracefulStop stop({.signals = {SIGUSR2}});
    std::signal(SIGUSR2, others_handler);
  }
  others_calls = 0;
  ASSERT_EQ(::raise(SIGUSR2), 0);
  EXPECT_EQ(others_calls, 1);
}

TEST(GracefulStop, ByTheProgramItself) {
  GracefulStop stop;
  std::thread([&] { stop.request(); }).join();
  EXPECT_TRUE(stop.requested());
  EXPECT_TRUE(stop.requested_anywhere());
  EXPECT_EQ(stop.signal(), 0);
}

TEST(GracefulStop, WrongOptions) {
  EXPECT_THROW(GracefulStop({.signals = {SIGTERM, SIGKILL}}), InvalidArgument);
  EXPECT_THROW(GracefulStop({.signals = {-3}}), InvalidArgument);
  EXPECT_THROW(GracefulStop({.every = 0}), InvalidArgument);
  GracefulStop works;  // the failed ones left nothing behind
}

// A child does not check whether it should stop; a worker of a data loader that its parent ends must not live on.
TEST(GracefulStop, ASignalEndsAForkedChild) {
  GracefulStop stop;
  const pid_t child = ::fork();
  if (child == 0) {
    ::raise(SIGTERM);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
  EXPECT_FALSE(stop.requested());
  const pid_t other = ::fork();
  if (other == 0) {
    try {
      const GracefulStop own;
      ::raise(SIGTERM);
      ::_exit(own.requested() ? 0 : 1);
    } catch (...) {
      ::_exit(2);
    }
  }
  ASSERT_EQ(::waitpid(other, &status, 0), other);
  EXPECT_EQ(status, 0);
}

TEST(GracefulStop, ASecondSignalEndsAtOnce) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGTERM, SIG_DFL);
    ::signal(SIGINT, SIG_DFL);
    GracefulStop stop;
    ::raise(SIGTERM);
    if (!stop.requested()) ::_exit(1);
    // sleep: the time between the signals is what is tested
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ::raise(SIGINT);
    ::_exit(2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << WEXITSTATUS(status);
  EXPECT_EQ(WTERMSIG(status), SIGINT);
}

// ---- Ranks ----------------------------------------------------------------------------------------------------------

// One rank alone gets a signal, at step 5: all stop at the step that the interval says, and know the signal.
TEST(GracefulStop, AllRanksStopAtTheSameStep) {
  run_ranks({.n = 3, .as = As::processes}, [](Rank& r) {
    init_process_group(r.world);
    for (const int every : {1, 4}) {
      GracefulStop stop({.every = every});
      int step = 0;
      for (; step < 100; ++step) {
        if (step == 5 && r.rank == 1) ::raise(SIGINT);
        if (stop.requested_anywhere()) break;
      }
      EXPECT_EQ(step, every == 1 ? 5 : 7);
      EXPECT_EQ(stop.signal(), SIGINT);
      EXPECT_TRUE(stop.requested());
    }
    barrier();
    destroy_process_group();
  });
}

TEST(EarlyStopping, RanksDecideAlikeByRankZerosNumber) {
  run_ranks({.n = 3}, [](Rank& r) {
    EarlyStopping early({.patience = 2, .group = r.world});
    // The others' numbers get better all the time.
    EXPECT_FALSE(early.update(r.rank == 0 ? 1.0 : 0.5));
    EXPECT_TRUE(early.improved());
    EXPECT_FALSE(early.update(r.rank == 0 ? 1.0 : 0.4));
    EXPECT_TRUE(early.update(r.rank == 0 ? 1.5 : 0.3));
    EXPECT_EQ(early.best(), 1.0);
    r.world->barrier();
  });
}

// ---- Early stopping -------------------------------------------------------------------------------------------------

int updates_until_stop(EarlyStoppingOptions options, const std::vector<double>& values) {
  EarlyStopping early(std::move(options));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (early.update(values[i])) return static_cast<int>(i) + 1;
  }
  return 0;
}

TEST(EarlyStopping, PatienceDeltaAndMode) {
  const double nan = std::nan("");
  const double infinity = INFINITY;
  EXPECT_EQ(updates_until_stop({.patience = 1}, {3, 2, 1, 1}), 4) << "equal does not count as better";
  EXPECT_EQ(updates_until_stop({.patience = 2}, {3, 4, 2, 4, 4}), 5) << "an improvement starts the wait anew";
  EXPECT_EQ(updates_until_stop({.patience = 2, .min_delta = 0.5}, {3, 2.6, 2.5}), 3);
  EXPECT_EQ(updates_until_stop({.patience = 2, .min_delta = 0.5}, {3, 2.6, 2.4, 3, 3}), 5);
  EXPECT_EQ(updates_until_stop({.patience = 2, .mode = StopMode::max}, {3, 4, 5, 5, 4}), 5);
  EXPECT_EQ(updates_until_stop({.patience = 2, .mode = StopMode::max}, {1, 2, 3, 4}), 0);
  EXPECT_EQ(updates_until_stop({.patience = 2}, {nan, nan}), 2);
  EXPECT_EQ(updates_until_stop({.patience = 2}, {nan, 1, nan, 0.5, nan, nan}), 6);
  EXPECT_EQ(updates_until_stop({.patience = 2}, {infinity, infinity, 5, 4}), 0);
  EXPECT_THROW(EarlyStopping({.patience = 0}), InvalidArgument);
  EXPECT_THROW(EarlyStopping({.min_delta = -1}), InvalidArgument);
  EXPECT_THROW(EarlyStopping({.min_delta = nan}), InvalidArgument);
}

TEST(EarlyStopping, GoesOnFromItsState) {
  const std::vector<double> values = {1, 0.1 + 0.2, 0.3, 7, 8};
  for (std::size_t cut = 0; cut < values.size(); ++cut) {
    EarlyStopping first({.patience = 2}), second({.patience = 2}), whole({.patience = 2});
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i == cut) second.load_state_dict(first.state_dict());
      (i < cut ? first : second).update(values[i]);
      whole.update(values[i]);
    }
    EXPECT_EQ(second.state_dict(), whole.state_dict());
    EXPECT_TRUE(second.should_stop());
    EXPECT_EQ(second.best(), 0.3) << "to the last bit";
    EXPECT_EQ(second.best_update(), 3);
    EXPECT_EQ(second.updates(), 5);
  }
  EarlyStopping early;
  for (const char* wrong :
       {"", "best", "best 1 updates 2 best_update 3 waited 0", "best 1 updates 2 best_update 1 waited 1x"}) {
    EXPECT_THROW(early.load_state_dict(wrong), InvalidArgument) << wrong;
  }
  EXPECT_EQ(early.updates(), 0);
}

// ---- A job ----------------------------------------------------------------------------------------------------------

std::string word_after(const std::string& text, const std::string& label) {
  const auto at = text.find(label);
  if (at == std::string::npos) return "";
  return text.substr(at + label.size(), text.find_first_of(" \n", at + label.size()) - at - label.size());
}

TEST(GracefulStop, AJobThatIsEndedGoesOnWithTheSameBits) {
  const TemporaryDirectory folder;
  const auto arguments = [&](const std::string& name, std::vector<std::string> more) {
    std::vector<std::string> all = {"run", "-n", "2", STOP_WORKER, folder.path() + "/" + name, "30"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto whole = launched::maniple(arguments("whole", {}));
  ASSERT_EQ(whole.code, 0) << whole.err;
  const std::string weights = word_after(whole.out, "weights ");
  ASSERT_EQ(weights.size(), 16u) << whole.out;

  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string name = std::to_string(signal);
    launched::Launched job(arguments(name, {"11"}));
    ASSERT_TRUE(job.wait_for("holding")) << job.err();
    job.signal(signal);
    EXPECT_EQ(job.wait(), 128 + signal) << job.err();
    EXPECT_EQ(job.count(format_text("stopped at 12 by {}", signal)), 2) << job.out() << job.err();
    EXPECT_EQ(job.count("weights"), 0) << "it did not get to the end";

    if (signal == SIGINT) continue;  // once is enough for the rest
    const auto rest = launched::maniple(arguments(name, {}));
    EXPECT_EQ(rest.code, 0) << rest.err;
    EXPECT_NE(rest.out.find("[rank 1] from 12\n"), std::string::npos) << rest.out;
    EXPECT_NE(rest.out.find("[rank 0] weights " + weights), std::string::npos) << rest.out << whole.out;
    EXPECT_NE(rest.out.find("[rank 1] weights " + weights), std::string::npos) << rest.out << whole.out;
  }
}

}  // namespace
}  // namespace maniple::harness::stop_test
