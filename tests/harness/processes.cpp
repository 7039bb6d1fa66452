// Ranks as processes: the parent starts them, exchanges messages with them, and ensures that all of them end.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/base/files.h"
#include "harness/failures.h"
#include "harness/leaks.h"
#include "harness/lossy_link.h"
#include "harness/messages.h"
#include "harness/modes.h"
#include "harness/mpirun.h"
#include "harness/sanitizers.h"
#include "harness/start_process.h"
#include "harness/temporary_directory.h"
#include "tools/bench/virtual_network.h"

namespace maniple::harness {
namespace {

using bench::InsideNamespace;
using bench::VirtualNetwork;
using Clock = std::chrono::steady_clock;

constexpr auto kGraceAfterFailure = std::chrono::seconds(2);  // for the other ranks to report their errors
constexpr int kLookMs = 10;                                   // interval for polling ended and stopped processes

struct Child {
  pid_t pid = -1;
  UniqueFd channel;
  bool ended = false;
  bool stopped = false;
  bool waiting = false;  // in `phase`
  bool failed = false;
  bool was_killed_by_us = false;
  std::string phase;
};

/// "groups_test in futex_do_wait, maniple-net in ep_poll": where the threads wait in the kernel; 0 if this user may not
/// read it.
std::string where_threads_are(pid_t pid) {
  const std::string tasks = fmt::format("/proc/{}/task", pid);
  std::vector<std::string> places;
  for (const std::string& thread : names_in(tasks)) {
    std::string name = file_text(tasks + "/" + thread + "/comm");
    while (!name.empty() && name.back() == '\n') name.pop_back();
    places.push_back(fmt::format("{} in {}", name, file_text(tasks + "/" + thread + "/wchan")));
  }
  return fmt::format("{}", fmt::join(places, ", "));
}

class ProcessRun {
 public:
  ProcessRun(const RunOptions& options, int run_index)
      : options_(options), run_index_(run_index), children_(options.n) {
    result_.ended.resize(options.n);
    if (options.as == As::netns)
      network_.emplace(options.hosts, options.rate_mbit > 0 ? fmt::format("{:.0f}kbit", options.rate_mbit * 1000) : "",
                       options.queue_ms);
    if (options.lossy) lossy_.emplace(network_.value());
    write_secret(secret_path());
    ::mkdir(scratch().c_str(), 0700);
  }
  ~ProcessRun() { kill_all(); }
  ProcessRun(const ProcessRun&) = delete;
  ProcessRun& operator=(const ProcessRun&) = delete;

  RunResult run() {
    const auto start = Clock::now();
    deadline_ = start + std::chrono::duration_cast<Clock::duration>(options_.limit * kSlowdown);
    init_method_ = init_method();
    if (by_mpirun_) {
      start_all_by_mpirun();
    } else {
      for (int rank = 0; rank < options_.n; ++rank) start_rank(rank);
    }
    Message pids = {"pids"};
    for (const Child& child : children_) pids.push_back(std::to_string(child.pid));
    for (const Child& child : children_) send_message(child.channel.get(), pids);

    while (!all_ended()) {
      exchange_messages();
      look_for_changes();
      release_phase_if_complete();
      end_what_cannot_end_itself();
    }
    result_.elapsed = Clock::now() - start;
    if (lossy_) result_.packets_lost = lossy_->lost();
    show_failures();
    check_for_leftovers();
    return std::move(result_);
  }

 private:
  std::string secret_path() const { return directory_.path() + "/secret"; }
  std::string scratch() const { return directory_.path() + "/tmp"; }

  std::string init_method() const {
    if (options_.as == As::netns) return fmt::format("tcp://{}:29500", VirtualNetwork::address(0));
    if (options_.rendezvous_by_tcp) return fmt::format("tcp://127.0.0.1:{}", free_loopback_port());
    return fmt::format("file://{}/rendezvous", directory_.path());
  }

  std::vector<std::pair<std::string, std::string>> environment(int rank, int channel) const {
    ChildMode mode;
    mode.rank = rank;
    mode.run_index = run_index_;
    mode.channel = channel;
    mode.dir = directory_.path();
    mode.init_method = init_method_;
    for (int host = 0; network_ && host < network_->hosts(); ++host) mode.hosts += VirtualNetwork::address(host) + ",";

    auto env = options_.env;
    env.emplace_back(kChildVariable, encode(mode));
    env.emplace_back("MANIPLE_SECRET_FILE", secret_path());
    env.emplace_back("TMPDIR", scratch());
    return env;
  }

  void start_rank(int rank) {
    Child& child = children_[rank];
    auto [ours, theirs] = make_channel();
    const auto env = environment(rank, theirs.get());
    std::optional<InsideNamespace> inside;
    if (network_) inside.emplace(network_->descriptor(host_of(options_, rank)));
    child.pid = start_this_test_again(env, theirs.get());
    child.channel = std::move(ours);
  }

  void start_all_by_mpirun() {
    MpiRanks started = start_by_mpirun({.n = options_.n,
                                        .dir = directory_.path(),
                                        .program = this_test_again(),
                                        .env = environment(-1, -1),
                                        .network = network_ ? &*network_ : nullptr,
                                        .limit_s = options_.limit.count() * kSlowdown});
    launcher_ = started.launcher;
    for (int rank = 0; rank < options_.n; ++rank) {
      children_[rank].pid = started.ranks[static_cast<std::size_t>(rank)].pid;
      children_[rank].channel = std::move(started.ranks[static_cast<std::size_t>(rank)].channel);
    }
  }

  bool all_ended() const {
    return launcher_ < 0 &&
           std::all_of(children_.begin(), children_.end(), [](const Child& child) { return child.ended; });
  }

  void exchange_messages() {
    std::vector<pollfd> polls;
    for (const Child& child : children_) polls.push_back({child.channel.get(), POLLIN, 0});
    ::poll(polls.data(), polls.size(), kLookMs);
    for (int rank = 0; rank < options_.n; ++rank) read_messages(rank);
  }

  void read_messages(int rank) {
    Child& child = children_[rank];
    bool gone = false;
    while (child.channel) {
      const auto message = receive_message(child.channel.get(), false, gone);
      if (message) handle(rank, *message);
      if (gone) child.channel.reset();
      if (!message) return;
    }
  }

  void handle(int rank, const Message& message) {
    Child& child = children_[rank];
    const std::string& what = message.at(0);
    if (what == "phase") {
      child.waiting = true;
      child.phase = message.at(1);
    } else if (what == "report") {
      result_.reports[message.at(1)][rank] = message.at(2);
    } else if (what == "link") {
      if (!network_) throw std::logic_error("only netns runs have links to cut");
      set_link(std::stoi(message.at(1)), message.at(2));
      send_message(child.channel.get(), {"done"});
    } else if (what == "failure") {
      child.failed = true;
      note_failure({message.at(1), std::stoi(message.at(2)), fmt::format("rank {}: {}", rank, message.at(3))});
    } else if (what == "skip") {
      skips_.push_back(message.at(3));
    } else if (what == "finished") {
      result_.ended[rank].finished = true;
    }
  }

  void set_link(int host, const std::string& state) {
    std::istringstream words(state);
    std::string first;
    double fraction = 0;
    double seconds = 0;
    words >> first >> fraction >> seconds;
    if (first != kLossState) return network_->set_link(host, state);
    if (!lossy_) throw std::logic_error("only runs with `lossy` lose packets");
    lossy_->lose(fraction, Seconds(seconds));
  }

  // For ranks that mpirun started: a rank has ended when its channel is closed, and mpirun ends after all ranks.
  void look_for_changes_by_mpirun() {
    for (int rank = 0; rank < options_.n; ++rank) {
      Child& child = children_[rank];
      if (!child.ended && !child.channel) note_end(rank, result_.ended[rank].finished ? 0 : SIGKILL);
    }
    int status = 0;
    if (::waitpid(launcher_, &status, WNOHANG) != launcher_) return;
    launcher_ = -1;
    const bool all_well = failures_.empty() && options_.expect_dead.empty() && !options_.fault.ends_rank();
    if (all_well && status != 0)
      note_failure({"", -1, fmt::format("mpirun ended with status {:x}: a rank ended badly", status)});
  }

  void look_for_changes() {
    if (launcher_ >= 0) return look_for_changes_by_mpirun();
    for (int rank = 0; rank < options_.n; ++rank) {
      Child& child = children_[rank];
      int status = 0;
      while (!child.ended && ::waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == child.pid) {
        if (WIFSTOPPED(status)) {
          child.stopped = true;
        } else if (WIFCONTINUED(status)) {
          child.stopped = false;
        } else {
          note_end(rank, status);
        }
      }
    }
  }

  void note_end(int rank, int status) {
    Child& child = children_[rank];
    read_messages(rank);
    child.channel.reset();
    child.ended = true;
    RunResult::Ended& ended = result_.ended[rank];
    if (WIFSIGNALED(status)) ended.signal = WTERMSIG(status);
    if (WIFEXITED(status)) ended.exit_code = WEXITSTATUS(status);
    if (child.failed || child.was_killed_by_us || may_die(options_, rank)) return;
    const char* when = ended.finished ? "after its test was done" : "before its test was done";
    if (ended.signal != 0) {
      note_failure(
          {"", -1,
           fmt::format("rank {} was ended by signal {} ({}) {}", rank, ended.signal, ::strsignal(ended.signal), when)});
    } else if (ended.exit_code != 0 || !ended.finished) {
      note_failure({"", -1, fmt::format("rank {} exited with status {} {}", rank, ended.exit_code, when)});
    }
  }

  void note_failure(const Failure& failure) {
    failures_.push_back(failure);
    deadline_ = std::min<Clock::time_point>(deadline_, Clock::now() + kGraceAfterFailure);
  }

  void release_phase_if_complete() {
    const std::string* name = nullptr;
    for (const Child& child : children_) {
      if (child.ended || child.stopped) continue;
      if (!child.waiting) return;
      if (name != nullptr && *name != child.phase) {
        note_failure({"", -1, fmt::format("ranks wait for different phases, \"{}\" and \"{}\"", *name, child.phase)});
        return;
      }
      name = &child.phase;
    }
    for (Child& child : children_) {
      if (child.ended || child.stopped) continue;
      child.waiting = false;
      send_message(child.channel.get(), {"go"});
    }
  }

  void end_what_cannot_end_itself() {
    bool only_stopped = true;
    for (const Child& child : children_) only_stopped = only_stopped && (child.ended || child.stopped);
    if (only_stopped) kill_all();
    if (Clock::now() < deadline_ || all_ended()) return;
    if (failures_.empty()) {
      std::vector<std::string> states;
      for (int rank = 0; rank < options_.n; ++rank) {
        const Child& child = children_[rank];
        if (child.ended) continue;
        states.push_back(fmt::format("rank {} {}", rank,
                                     child.stopped   ? "is stopped"
                                     : child.waiting ? "waits in phase \"" + child.phase + "\""
                                                     : "runs: " + where_threads_are(child.pid)));
      }
      note_failure({"", -1,
                    fmt::format("the run's limit of {} s has passed: {}", options_.limit.count() * kSlowdown,
                                fmt::join(states, ", "))});
    }
    kill_all();
  }

  // Each rank leads its own process group, so processes that it has started are killed with it.
  void kill_all() {
    if (launcher_ >= 0) {
      ::kill(-launcher_, SIGKILL);
      ::waitpid(launcher_, nullptr, 0);
      launcher_ = -1;
    }
    for (Child& child : children_) {
      if (child.pid <= 0 || child.ended) continue;
      child.was_killed_by_us = true;
      ::kill(by_mpirun_ ? child.pid : -child.pid, SIGKILL);
      int status = by_mpirun_ ? SIGKILL : 0;
      while (!by_mpirun_ && ::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
      }
      note_end(static_cast<int>(&child - children_.data()), status);
    }
  }

  void show_failures() {
    for (const Failure& failure : failures_) {
      if (failure.line >= 0 && !failure.file.empty()) {
        ADD_FAILURE_AT(failure.file.c_str(), failure.line) << failure.text;
      } else {
        ADD_FAILURE() << failure.text;
      }
    }
    const auto skip = [](const std::string& reason) { GTEST_SKIP() << reason; };
    if (!skips_.empty() && failures_.empty()) skip(skips_.front());
  }

  void check_for_leftovers() {
    for (int rank = 0; rank < options_.n; ++rank) {
      if (!by_mpirun_ && ::kill(-children_[rank].pid, SIGKILL) == 0)
        ADD_FAILURE() << "rank " << rank << " left a process behind";
    }
    const auto files = paths_below(scratch());
    if (!files.empty()) ADD_FAILURE() << "files left behind: " << fmt::format("{}", fmt::join(files, ", "));
  }

  const RunOptions& options_;
  const int run_index_;
  const bool by_mpirun_ = init_options(options_, 0).backend == "mpi";
  pid_t launcher_ = -1;  // mpirun, while it runs
  TemporaryDirectory directory_;
  std::optional<VirtualNetwork> network_;
  std::optional<LossyLink> lossy_;
  std::string init_method_;
  std::vector<Child> children_;
  RunResult result_;
  std::vector<Failure> failures_;  // in order of time
  std::vector<std::string> skips_;
  Clock::time_point deadline_;
};

}  // namespace

RunResult run_as_processes(const RunOptions& options, int run_index) {
  const ProcessResources before = ProcessResources::now();
  RunResult result;
  try {
    result = ProcessRun(options, run_index).run();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "the harness could not run the ranks: " << error.what();
  }
  for (const std::string& leak : ProcessResources::leaked_since(before)) ADD_FAILURE() << "leaked by the run: " << leak;
  return result;
}

}  // namespace maniple::harness
