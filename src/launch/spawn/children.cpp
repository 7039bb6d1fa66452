#include "launch/spawn/children.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/host.h"
#include "comm/base/system_error.h"
#include "comm/rendezvous/secret_source.h"
#include "launch/process/descriptors.h"
#include "launch/process/process_table.h"

namespace maniple::launch {
namespace {

constexpr int kLookMs = 10;  // polling interval on kernels without pidfd

UniqueFd open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  (void)pid;
  return {};
#endif
}

}  // namespace

void SpawnWatch::open_messages(int first_rank) {
  messages_.open();
  first_rank_ = first_rank;
}

void SpawnWatch::add(pid_t pid, UniqueFd report) {
  ::fcntl(report.get(), F_SETFL, O_NONBLOCK);
  processes_.push_back({.pid = pid, .pidfd = open_pidfd(pid), .report = std::move(report)});
  pids_.push_back(pid);
}

bool SpawnWatch::all_ended() const noexcept {
  return std::all_of(processes_.begin(), processes_.end(), [](const Process& process) { return process.ended; });
}

void SpawnWatch::read_report(Process& process) {
  char bytes[4096];
  while (process.report && process.received.size() <= kMostReportBytes) {
    const ssize_t got = ::read(process.report.get(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    process.received.append(bytes, static_cast<std::size_t>(got));
  }
}

void SpawnWatch::look_at(Process& process) {
  if (process.ended) return;
  int status = 0;
  pid_t got = -1;
  while ((got = ::waitpid(process.pid, &status, WNOHANG)) < 0 && errno == EINTR) {
  }
  if (got == 0) return;
  // -1: the status is gone (SIGCHLD is ignored, or the program waited for any child); the report must do.
  process.ended = true;
  process.status_known = got == process.pid;
  process.status = status;
  read_report(process);
  process.answer = decode_report(process.received);
  process.report.reset();
  process.pidfd.reset();
}

void SpawnWatch::look_at_all() {
  for (Process& process : processes_) look_at(process);
  look_for_absent();
}

// Finds processes that ended without calling init(): the others would wait for them until init() times out.
void SpawnWatch::look_for_absent() {
  if (messages_.own_end() >= 0 && !messages_.receive()) messages_.close();
  if (!messages_.waiting()) return;
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    Process& process = processes_[i];
    const bool ended_well = process.ended && !process.ended_by_us && !has_failed(process);
    if (ended_well && !messages_.is_initialised(first_rank_ + static_cast<int>(i))) process.absent = true;
  }
}

bool SpawnWatch::has_failed(const Process& process) {
  if (!process.ended || process.ended_by_us) return false;
  if (process.absent) return true;
  if (!process.status_known) return !process.answer || !process.answer->finished;
  return process.status != 0;
}

bool SpawnWatch::wait(std::optional<Clock::time_point> until) {
  for (;;) {
    look_at_all();
    if (std::any_of(processes_.begin(), processes_.end(), has_failed) || all_ended()) return true;
    if (until && Clock::now() >= *until) return false;
    sleep_until_change(until);
  }
}

bool SpawnWatch::wait_for_cause(Clock::time_point until) {
  for (;;) {
    look_at_all();
    if (!cause_may_follow(failures()) || all_ended()) return true;
    if (Clock::now() >= until) return false;
    sleep_until_change(until);
  }
}

void SpawnWatch::sleep_until_change(std::optional<Clock::time_point> until) {
  std::vector<pollfd> changes;
  bool blind = false;
  for (const Process& process : processes_) {
    if (process.ended) continue;
    blind = blind || !process.pidfd;
    if (process.pidfd) changes.push_back({process.pidfd.get(), POLLIN, 0});
  }
  if (messages_.own_end() >= 0) changes.push_back({messages_.own_end(), POLLIN, 0});
  int limit = blind ? kLookMs : -1;
  if (until) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Clock::now()).count();
    const int bounded = static_cast<int>(std::clamp<long long>(left, 0, 60'000));
    limit = limit < 0 ? bounded : std::min(limit, bounded);
  }
  ::poll(changes.data(), changes.size(), limit);
}

std::vector<RankExit> SpawnWatch::failures() const {
  std::vector<RankExit> exits;
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    const Process& process = processes_[i];
    if (!has_failed(process)) continue;
    const int rank = first_rank_ + static_cast<int>(i);
    RankExit exit{.rank = static_cast<int>(i)};
    // A process without a report crashed or exited; at_us stays 0, so it precedes the exceptions the others then threw.
    if (process.answer) exit.at_us = process.answer->when_ns / 1000;
    exit.consequence = process.answer && process.answer->error && is_consequence(*process.answer->error, rank);
    if (exit.consequence) exit.blamed = std::max(-1, blamed_rank(*process.answer->error) - first_rank_);
    exits.push_back(std::move(exit));
  }
  return exits;
}

std::optional<SpawnError> SpawnWatch::first_failure() const {
  const std::vector<RankExit> exits = failures();
  if (exits.empty()) return std::nullopt;
  return error_of(static_cast<std::size_t>(exits[first_cause(exits)].rank));
}

SpawnError SpawnWatch::error_of(std::size_t rank) const {
  const Process& process = processes_[rank];
  SpawnError::Cause cause{.rank = static_cast<int>(rank), .pid = process.pid};
  std::string what;
  if (process.absent) {
    cause.exit_code = 0;
    what = fmt::format("ended before it called init(), where rank {} waits for it",
                       messages_.waiting().value_or(first_rank_));
  } else if (process.status_known && WIFSIGNALED(process.status)) {
    cause.signal = WTERMSIG(process.status);
    what = fmt::format("was ended by signal {} ({}, {})", cause.signal, signal_name(cause.signal),
                       ::strsignal(cause.signal));
  } else if (process.answer && !process.answer->finished) {
    if (process.status_known) cause.exit_code = WEXITSTATUS(process.status);
    cause.type = process.answer->type;
    cause.text = process.answer->text;
    if (process.answer->error) cause.kind = process.answer->error->kind;
    std::string message = cause.text;
    // LibTorch's exceptions append their stack to the message; text() has all of it.
    if (!process.answer->error) message.erase(std::min(message.find("\nException raised from "), message.size()));
    what = fmt::format("threw {}{}{}", cause.type, message.empty() ? "" : ": ", message);
  } else if (process.status_known) {
    cause.exit_code = WEXITSTATUS(process.status);
    what = fmt::format("exited with code {}", cause.exit_code);
  } else {
    what = "ended in a way that is not known, because this process ignores SIGCHLD or waits for all children elsewhere";
  }
  return SpawnError(fmt::format("[spawn process {}/{} pid {}] {}", rank, processes_.size(), process.pid, what),
                    std::move(cause));
}

void SpawnWatch::signal_all(int signal) noexcept {
  for (Process& process : processes_) {
    if (process.ended) continue;
    process.ended_by_us = true;
    ask_to_end(process.pid, signal);
  }
}

void SpawnWatch::forget_all() noexcept {
  processes_.clear();
  pids_.clear();
}

void SpawnWatch::end_all(Seconds grace) noexcept {
  const auto wait_all = [this](std::optional<Clock::time_point> until) {
    for (;;) {
      look_at_all();
      if (all_ended()) return true;
      if (until && Clock::now() >= *until) return false;
      sleep_until_change(until);
    }
  };
  look_at_all();
  signal_all(SIGTERM);
  if (wait_all(Clock::now() + std::chrono::duration_cast<Clock::duration>(grace))) return;
  signal_all(SIGKILL);
  wait_all(std::nullopt);
}

namespace {

constexpr int kMostProcesses = 4096;

bool is_on_several_machines(const SpawnOptions& options) {
  return options.nodes > 1 || options.world_size > options.nprocs;
}

int count_threads() {
  DIR* tasks = ::opendir("/proc/self/task");
  if (tasks == nullptr) throw_system_error("spawn: counting threads in /proc/self/task");
  int count = 0;
  while (const dirent* entry = ::readdir(tasks)) count += entry->d_name[0] != '.';
  ::closedir(tasks);
  return count;
}

/// Whether this process is a rank of a launched job, to which MASTER_ADDR and MASTER_PORT then belong.
bool is_a_rank() { return environment_text("LOCAL_RANK").has_value(); }

/// The options describe one machine. But a program may compute rank and world size across machines by itself and pass
/// them to init(), as PyTorch's tutorials do; then the environment names the master.
void take_master_of_environment(NodeEnvironment& node) {
  const auto address = environment_text("MASTER_ADDR");
  const auto port = environment_integer("MASTER_PORT", 1, 65535);
  if (!address || !port) return;
  node.master_addr = *address;
  node.master_port = static_cast<int>(*port);
}

/// The secret that the user gave to all machines of the job, if any; otherwise, on one machine, a random one.
std::optional<Secret> secret_for(bool several) {
  std::optional<Secret> secret;
  if (several || !is_a_rank()) secret = secret_from_environment();
  if (!secret && !several) secret = Secret::random();
  return secret;
}

}  // namespace

void check_spawn_options(const SpawnOptions& options) {
  MANIPLE_REQUIRE(options.nprocs >= 1 && options.nprocs <= kMostProcesses,
                  "spawn: nprocs is {}; expected the number of processes, 1 to {}", options.nprocs, kMostProcesses);
  MANIPLE_REQUIRE(options.nodes >= 1, "spawn: nodes is {}; expected the number of machines, 1 or more", options.nodes);
  MANIPLE_REQUIRE(options.node_rank >= 0, "spawn: node_rank is {}; expected 0 or more", options.node_rank);
  MANIPLE_REQUIRE(options.world_size >= 0, "spawn: world_size is {}; expected 0 (nodes * nprocs) or more",
                  options.world_size);
  const std::int64_t world = options.world_size > 0 ? options.world_size : std::int64_t{options.nodes} * options.nprocs;
  const std::int64_t last = (std::int64_t{options.node_rank} + 1) * options.nprocs;
  MANIPLE_REQUIRE(world <= INT32_MAX && last <= world,
                  "spawn: node_rank {} with {} processes needs ranks up to {}, but the world has {} (world_size, or "
                  "nodes * nprocs)",
                  options.node_rank, options.nprocs, last - 1, world);
  MANIPLE_REQUIRE(options.master_port >= 0 && options.master_port <= 65535,
                  "spawn: master_port is {}; expected a port, or 0 for a free one", options.master_port);
  MANIPLE_REQUIRE(options.grace.count() >= 0 && options.grace.count() <= 1e6,
                  "spawn: grace is {} s; expected 0 or more", options.grace.count());
  MANIPLE_REQUIRE(options.start_method == StartMethod::fork || options.start_method == StartMethod::reexec,
                  "spawn: start_method is {}; expected fork or reexec", static_cast<int>(options.start_method));
}

void check_fork_is_safe() {
  const int threads = count_threads();
  if (threads > 1)
    throw Unsupported(
        fmt::format("spawn: start method fork with {} threads in this process: the copies would have their locks but "
                    "not the threads, and "
                    "hang; use StartMethod::reexec, or spawn before threads start (LibTorch and OpenMP start them in "
                    "the first operation)",
                    threads));
}

SpawnRendezvous prepare_rendezvous(const SpawnOptions& options) {
  SpawnRendezvous rendezvous;
  NodeEnvironment& node = rendezvous.node;
  const bool several = is_on_several_machines(options);
  node.master_addr = options.master_addr;
  node.master_port = options.master_port;
  if (several) {
    if (node.master_addr.empty()) node.master_addr = environment_text("MASTER_ADDR").value_or("");
    if (node.master_port == 0)
      node.master_port = static_cast<int>(environment_integer("MASTER_PORT", 1, 65535).value_or(0));
    MANIPLE_REQUIRE(
        !node.master_addr.empty() && node.master_port != 0,
        "spawn: on several machines master_addr and master_port (or MASTER_ADDR and MASTER_PORT) say where machine 0 "
        "is; {} is missing",
        node.master_addr.empty() ? "the address" : "the port");
  } else {
    if (node.master_addr.empty() && node.master_port == 0 && !is_a_rank()) take_master_of_environment(node);
    if (node.master_addr.empty()) node.master_addr = "127.0.0.1";
    if (node.master_port == 0) {
      rendezvous.reservation = reserve_port(Address::parse("127.0.0.1:0"));
      node.master_port = Address::of_socket(rendezvous.reservation.get()).port();
    }
  }
  if (const auto secret = secret_for(several)) {
    rendezvous.secret = sealed_memory("maniple-secret", hex_of(*secret));
    node.secret_fd = rendezvous.secret.get();
  }
  node.cores = std::max(1, CoreSet::of_this_process().count());
  return rendezvous;
}

WorkerAssignment assignment_of(const SpawnOptions& options, int index) {
  return {.rank = options.node_rank * options.nprocs + index,
          .node_rank = options.node_rank,
          .local_rank = index,
          .local_size = options.nprocs,
          .world_size = options.world_size > 0 ? options.world_size : options.nodes * options.nprocs};
}

}  // namespace maniple::launch
