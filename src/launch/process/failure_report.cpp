#include "launch/process/failure_report.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <optional>

#include <fmt/format.h>

namespace maniple::launch {
namespace {

constexpr std::int64_t kTogether_us = 20'000;
constexpr std::chrono::duration<double> kReaction{5.0};  // a program that goes on for longer has handled its failure

struct NamedSignal {
  int number;
  const char* name;
  const char* meaning;
};
constexpr NamedSignal kSignals[] = {
    {SIGHUP, "SIGHUP", "hang-up"},
    {SIGINT, "SIGINT", "interrupt"},
    {SIGQUIT, "SIGQUIT", "quit"},
    {SIGILL, "SIGILL", "illegal instruction"},
    {SIGTRAP, "SIGTRAP", "trap"},
    {SIGABRT, "SIGABRT", "abort"},
    {SIGBUS, "SIGBUS", "bus error"},
    {SIGFPE, "SIGFPE", "arithmetic error"},
    {SIGKILL, "SIGKILL", "killed"},
    {SIGUSR1, "SIGUSR1", "user signal 1"},
    {SIGSEGV, "SIGSEGV", "segmentation fault"},
    {SIGUSR2, "SIGUSR2", "user signal 2"},
    {SIGPIPE, "SIGPIPE", "broken pipe"},
    {SIGALRM, "SIGALRM", "alarm"},
    {SIGTERM, "SIGTERM", "terminated"},
    {SIGXCPU, "SIGXCPU", "limit of processor time"},
    {SIGXFSZ, "SIGXFSZ", "limit of file size"},
    {SIGSYS, "SIGSYS", "forbidden system call"},
};

const NamedSignal* find_signal(int number) {
  for (const NamedSignal& signal : kSignals) {
    if (signal.number == number) return &signal;
  }
  return nullptr;
}

}  // namespace

std::string signal_name(int signal) {
  const NamedSignal* known = find_signal(signal);
  return known != nullptr ? known->name : fmt::format("signal {}", signal);
}

namespace {

/// Whether `error` is a timeout whose missing ranks are known and do not include `rank`: they caused it.
bool waits_for_others(const ErrorInfo& error, int rank) {
  const std::vector<int>& missing = error.ranks;
  return error.kind == ErrorKind::timeout && !missing.empty() &&
         std::find(missing.begin(), missing.end(), rank) == missing.end();
}

}  // namespace

bool is_consequence(const ErrorInfo& error, int rank) {
  if (error.kind == ErrorKind::peer_lost) return true;
  if (waits_for_others(error, rank)) return true;
  if (error.kind == ErrorKind::aborted) return error.origin != rank;
  return error.origin >= 0 && error.origin != rank;
}

bool follows_from(const ErrorInfo& earlier, const ErrorInfo& later, int rank, std::chrono::duration<double> after) {
  // A group fails once. If another group of that name fails, it was made after the failure.
  if (after > kReaction || later.group == earlier.group) return false;
  return later.kind == ErrorKind::aborted || is_consequence(later, rank);
}

int blamed_rank(const ErrorInfo& error) {
  if (error.kind == ErrorKind::timeout && !error.ranks.empty()) return error.ranks.front();
  if (error.kind != ErrorKind::peer_lost) return error.origin;
  if (error.loss == LossKind::left) return -1;
  return error.ranks.empty() ? error.origin : error.ranks.front();
}

int left_rank(const ErrorInfo& error) {
  const bool left = error.kind == ErrorKind::peer_lost && error.loss == LossKind::left;
  return left && !error.ranks.empty() ? error.ranks.front() : -1;
}

std::size_t first_cause(const std::vector<RankExit>& exits) {
  const auto better = [](const RankExit& a, const RankExit& b) {
    if (a.consequence != b.consequence) return b.consequence;
    const bool together = std::abs(a.at_us - b.at_us) <= kTogether_us;
    if (together && (a.signal != 0) != (b.signal != 0)) return a.signal != 0;
    return a.at_us < b.at_us;
  };
  std::size_t best = 0;
  for (std::size_t i = 1; i < exits.size(); ++i) {
    if (better(exits[i], exits[best])) best = i;
  }
  const auto blamed_by = [&](std::size_t i) -> std::optional<std::size_t> {
    if (!exits[i].consequence || exits[i].blamed < 0) return std::nullopt;
    const auto found =
        std::find_if(exits.begin(), exits.end(), [&](const RankExit& exit) { return exit.rank == exits[i].blamed; });
    return found == exits.end() ? std::nullopt : std::optional(static_cast<std::size_t>(found - exits.begin()));
  };
  std::optional<std::size_t> next = best;
  for (std::size_t steps = 0; steps < exits.size() && (next = blamed_by(best)); ++steps) best = *next;
  if (!next) return best;
  // Ranks blame each other, for instance when the network between them is cut. The rank that is blamed most often wins,
  // then the earlier exit.
  const auto accusers = [&](std::size_t of) {
    return std::count_if(exits.begin(), exits.end(), [&](const RankExit& e) { return e.blamed == exits[of].rank; });
  };
  const std::size_t begin = best;
  for (std::size_t i = *blamed_by(begin); i != begin; i = *blamed_by(i)) {
    const auto more = accusers(i) - accusers(best);
    if (more > 0 || (more == 0 && better(exits[i], exits[best]))) best = i;
  }
  return best;
}

int unseen_cause(const std::vector<RankExit>& exits) {
  const RankExit& first = exits[first_cause(exits)];
  if (!first.consequence) return -1;
  const bool seen =
      std::any_of(exits.begin(), exits.end(), [&](const RankExit& exit) { return exit.rank == first.blamed; });
  return seen ? -1 : first.blamed;
}

bool cause_may_follow(const std::vector<RankExit>& exits) {
  return std::all_of(exits.begin(), exits.end(), [](const RankExit& exit) { return exit.consequence; });
}

std::string describe_end(const RankExit& exit) {
  const NamedSignal* known = find_signal(exit.signal);
  std::string text = exit.signal == 0   ? fmt::format("exit code {}", exit.code)
                     : known != nullptr ? fmt::format("signal {} ({})", known->name, known->meaning)
                                        : fmt::format("signal {}", exit.signal);
  if (!exit.cause.empty()) text += " " + exit.cause;
  return text;
}

const RankExit* early_end(const std::vector<RankExit>& exits, const std::vector<RankExit>& ended) {
  const RankExit& first = exits[first_cause(exits)];
  const int unseen = unseen_cause(exits);
  const int rank = unseen >= 0 ? unseen : first.consequence ? first.left : -1;
  const auto found = std::find_if(ended.begin(), ended.end(), [&](const RankExit& exit) { return exit.rank == rank; });
  return found == ended.end() ? nullptr : &*found;
}

std::string describe_failure(const RankExit& exit, int world_size, int unseen, const RankExit* early) {
  if (exit.pid < 0) {
    return fmt::format("maniple: rank {} of {} could not be started on host {}: {}", exit.rank, world_size, exit.host,
                       exit.error);
  }
  std::string text;
  if (early != nullptr) {
    text = fmt::format(
        "maniple: rank {} of {} ended early, on host {} (pid {}): exit code 0, while other ranks waited for it; rank "
        "{} "
        "failed because of it, on host {} (pid {}): {}",
        early->rank, world_size, early->host, early->pid, exit.rank, exit.host, exit.pid, describe_end(exit));
  } else if (unseen >= 0 && unseen < world_size) {
    text = fmt::format(
        "maniple: rank {} of {} failed first, but has not ended (stopped, cut off, or busy?); rank {} ended because of "
        "it, on host {} (pid {}): {}",
        unseen, world_size, exit.rank, exit.host, exit.pid, describe_end(exit));
  } else {
    text = fmt::format("maniple: rank {} of {} failed first, on host {} (pid {}): {}", exit.rank, world_size, exit.host,
                       exit.pid, describe_end(exit));
  }
  if (!exit.error.empty()) text += fmt::format("\nmaniple:   error: {}", exit.error);
  if (!exit.tail.empty()) {
    text += fmt::format("\nmaniple:   last lines of rank {}:", exit.rank);
    for (const std::string& line : exit.tail) text += "\nmaniple:     " + line;
  }
  return text;
}

}  // namespace maniple::launch
