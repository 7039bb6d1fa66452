#include "process/failure_report.h"

#include <cctype>
#include <csignal>
#include <cstring>

#include <fmt/format.h>

namespace maniple::launch {
namespace {

constexpr std::int64_t kTogether_us = 20'000;

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

/// Reads digits at `at`; -1 if there are none.
int digits_at(std::string_view text, std::size_t at) {
  constexpr int kMost = 100'000'000;
  int value = -1;
  for (; at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])) != 0; ++at) {
    value = (value < 0 ? 0 : value) * 10 + (text[at] - '0');
    if (value > kMost) return -1;
  }
  return value;
}

/// Where the text after "[all_reduce #12 world rank 3/8] " begins; npos if the line has no such beginning.
std::size_t after_context(std::string_view line) {
  for (auto open = line.find('['); open != std::string_view::npos; open = line.find('[', open + 1)) {
    const auto close = line.find("] ", open);
    if (close == std::string_view::npos) return std::string_view::npos;
    const std::string_view inside = line.substr(open + 1, close - open - 1);
    const auto rank = inside.rfind("rank ");
    if (rank == std::string_view::npos) continue;
    const std::string_view numbers = inside.substr(rank + 5);
    if (digits_at(numbers, 0) >= 0 && numbers.find('/') != std::string_view::npos) return close + 2;
  }
  return std::string_view::npos;
}

}  // namespace

std::string signal_name(int signal) {
  const NamedSignal* known = find_signal(signal);
  return known != nullptr ? known->name : fmt::format("signal {}", signal);
}

int blamed_rank(std::string_view error) {
  const auto begin = after_context(error);
  if (begin == std::string_view::npos) return -1;
  const std::string_view text = error.substr(begin);
  const auto lost = text.find(" lost");
  if (lost == std::string_view::npos) return -1;
  const auto rank = text.substr(0, lost).find("rank ");
  if (rank == std::string_view::npos) return -1;
  return digits_at(text, rank + 5);
}

std::size_t first_cause(const std::vector<RankExit>& exits) {
  const auto better = [](const RankExit& a, const RankExit& b) {
    const bool a_blames = blamed_rank(a.error) >= 0;
    const bool b_blames = blamed_rank(b.error) >= 0;
    if (a_blames != b_blames) return b_blames;
    const bool together = std::abs(a.at_us - b.at_us) <= kTogether_us;
    if (together && (a.signal != 0) != (b.signal != 0)) return a.signal != 0;
    return a.at_us < b.at_us;
  };
  std::size_t best = 0;
  for (std::size_t i = 1; i < exits.size(); ++i) {
    if (better(exits[i], exits[best])) best = i;
  }
  return best;
}

bool cause_may_follow(const std::vector<RankExit>& exits) {
  for (const RankExit& exit : exits) {
    if (blamed_rank(exit.error) < 0) return false;
  }
  return true;
}

std::string describe_end(const RankExit& exit) {
  const NamedSignal* known = find_signal(exit.signal);
  std::string text = exit.signal == 0   ? fmt::format("exit code {}", exit.code)
                     : known != nullptr ? fmt::format("signal {} ({})", known->name, known->meaning)
                                        : fmt::format("signal {}", exit.signal);
  if (!exit.cause.empty()) text += " " + exit.cause;
  return text;
}

std::string describe_failure(const RankExit& exit, int world_size) {
  if (exit.pid < 0) {
    return fmt::format("maniple: rank {} of {} could not be started on host {}: {}", exit.rank, world_size, exit.host,
                       exit.error);
  }
  std::string text = fmt::format("maniple: rank {} of {} failed first, on host {} (pid {}): {}", exit.rank, world_size,
                                 exit.host, exit.pid, describe_end(exit));
  if (!exit.error.empty()) text += fmt::format("\nmaniple:   error: {}", exit.error);
  if (!exit.tail.empty()) {
    text += fmt::format("\nmaniple:   last lines of rank {}:", exit.rank);
    for (const std::string& line : exit.tail) text += "\nmaniple:     " + line;
  }
  return text;
}

int rate_error_line(std::string_view line) {
  if (after_context(line) != std::string_view::npos) return 3;
  if (line.find("what():  ") != std::string_view::npos || line.starts_with("maniple: error")) return 2;
  // "ValueError: ...", "torch.cuda.OutOfMemoryError: ...", "error: ..."
  const auto colon = line.find(": ");
  if (colon == std::string_view::npos) return 0;
  const std::string_view word = line.substr(0, colon);
  if (word.find(' ') != std::string_view::npos) return 0;
  for (const std::string_view ending : {"Error", "Exception", "error", "fatal", "FATAL", "ERROR"}) {
    if (word.ends_with(ending)) return 1;
  }
  return 0;
}

}  // namespace maniple::launch
