// Ranks as threads of this process.
#include <gtest/gtest.h>

#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "harness/failures.h"
#include "harness/leaks.h"
#include "harness/modes.h"
#include "harness/sanitizers.h"
#include "harness/temporary_directory.h"

namespace maniple::harness {
namespace {

// Ends a rank whose run has failed elsewhere.
struct RunEnded : std::runtime_error {
  RunEnded() : std::runtime_error("the run has failed on another rank") {}
};

// Sets environment variables for the duration of a run.
class Environment {
 public:
  explicit Environment(const RunOptions& options) {
    for (const auto& [name, value] : options.env) {
      const char* old = std::getenv(name.c_str());
      saved_.emplace_back(name, old == nullptr ? std::nullopt : std::optional<std::string>(old));
      ::setenv(name.c_str(), value.c_str(), 1);
    }
  }
  ~Environment() {
    for (const auto& [name, value] : saved_) {
      value ? ::setenv(name.c_str(), value->c_str(), 1) : ::unsetenv(name.c_str());
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> saved_;
};

class ThreadRun {
 public:
  ThreadRun(const RunOptions& options, const Body& body) : options_(options), body_(body), worlds_(options.n) {
    result_.ended.resize(options.n);
    store_ = make_memory_store();
  }

  RunResult run() {
    const auto start = std::chrono::steady_clock::now();
    const Environment environment(options_);
    {
      const FailureWatch watch([this](const Failure&, bool skip) {
        if (!skip) note_failure();
      });
      std::vector<std::thread> threads;
      threads.reserve(options_.n);
      living_ = options_.n;
      for (int rank = 0; rank < options_.n; ++rank) threads.emplace_back([this, rank] { run_rank(rank); });
      supervise();
      for (std::thread& thread : threads) thread.join();
    }
    store_.reset();
    if (!later_failures_.empty())
      ADD_FAILURE() << "after the first failure:\n" << fmt::format("{}", fmt::join(later_failures_, "\n"));
    result_.elapsed = std::chrono::steady_clock::now() - start;
    return std::move(result_);
  }

 private:
  class ThreadChannel : public ControlChannel {
   public:
    ThreadChannel(ThreadRun& run, int rank) : run_(run), rank_(rank) {}
    void phase(const std::string& name) override { run_.phase(name); }
    void report(const std::string& key, const std::string& value) override {
      const std::lock_guard lock(run_.mutex_);
      run_.result_.reports[key][rank_] = value;
    }
    void set_link(int, const std::string&) override { throw std::logic_error("only netns runs have links to cut"); }
    void initialised(const std::shared_ptr<ProcessGroup>& world) override {
      std::unique_lock lock(run_.mutex_);
      run_.worlds_[rank_] = world;
      const bool late = run_.failed_;
      lock.unlock();
      if (late) throw RunEnded();
    }

   private:
    ThreadRun& run_;
    int rank_;
  };

  void run_rank(int rank) {
    const testing::ScopedTrace trace(__FILE__, __LINE__, fmt::format("rank {} of {}", rank, options_.n));
    try {
      ThreadChannel channel(*this, rank);
      Rank self({.rank = rank,
                 .size = options_.n,
                 .host = 0,
                 .dir = directory_.path(),
                 .init = init_options(options_, rank),
                 .store = store_,
                 .pids = std::vector<pid_t>(options_.n, ::getpid()),
                 .hosts = {},
                 .fault = options_.fault},
                channel);
      if (options_.init) self.init();
      body_(self);
      result_.ended[rank].finished = true;
    } catch (const InjectedFault&) {
    } catch (const RunEnded&) {
    } catch (...) {
      const std::string text = fmt::format("rank {} threw {}", rank, describe_current_exception());
      std::unique_lock lock(mutex_);
      if (failed_) {
        later_failures_.push_back(text);
      } else if (!may_die(options_, rank)) {
        failed_ = true;
        lock.unlock();
        ADD_FAILURE() << text;
      }
    }
    const std::lock_guard lock(mutex_);
    --living_;
    release_phase_if_complete();
    changed_.notify_all();
  }

  void note_failure() {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }

  void phase(const std::string& name) {
    std::unique_lock lock(mutex_);
    if (failed_) throw RunEnded();
    if (waiting_ > 0 && phase_name_ != name) {
      throw std::logic_error(fmt::format("phase \"{}\" while others are in phase \"{}\"", name, phase_name_));
    }
    phase_name_ = name;
    ++waiting_;
    const int mine = phases_done_;
    release_phase_if_complete();
    changed_.wait(lock, [&] { return phases_done_ != mine || failed_; });
    if (phases_done_ == mine) throw RunEnded();
  }

  void release_phase_if_complete() {
    if (waiting_ == 0 || waiting_ < living_) return;
    waiting_ = 0;
    ++phases_done_;
    changed_.notify_all();
  }

  // Waits for the ranks. On failure or after the limit, wakes ranks that are stuck in their world.
  void supervise() {
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(options_.limit * kSlowdown);
    std::unique_lock lock(mutex_);
    const auto over = [this] { return living_ == 0; };
    const bool in_time = changed_.wait_for(lock, limit, [&] { return over() || failed_; });
    if (over()) return;
    if (!in_time) {
      const int stuck = living_;
      lock.unlock();
      ADD_FAILURE() << stuck << " of " << options_.n << " ranks were not done within the run's limit of "
                    << options_.limit.count() * kSlowdown << " s";
      lock.lock();
    }
    while (!over()) {
      for (std::weak_ptr<ProcessGroup>& weak : worlds_) {
        if (const auto world = weak.lock()) {
          weak.reset();
          lock.unlock();
          world->abort("the test has failed on another rank");
          lock.lock();
        }
      }
      const auto grace = limit + std::chrono::seconds(10);
      if (!changed_.wait_for(lock, grace, over)) {
        std::fprintf(stderr, "%d ranks cannot be ended, so the program ends\n", living_);
        std::_Exit(1);
      }
    }
  }

  const RunOptions& options_;
  const Body& body_;
  TemporaryDirectory directory_;
  std::shared_ptr<Store> store_;

  std::mutex mutex_;
  std::condition_variable changed_;
  RunResult result_;
  std::vector<std::weak_ptr<ProcessGroup>> worlds_;
  std::vector<std::string> later_failures_;  // of other ranks, after the run had failed
  int living_ = 0;
  bool failed_ = false;
  std::string phase_name_;
  int waiting_ = 0;
  int phases_done_ = 0;
};

}  // namespace

RunResult run_as_threads(const RunOptions& options, const Body& body) {
  const ProcessResources before = ProcessResources::now();
  RunResult result = ThreadRun(options, body).run();
  for (const std::string& leak : ProcessResources::leaked_since(before)) ADD_FAILURE() << "leaked by the run: " << leak;
  return result;
}

}  // namespace maniple::harness
