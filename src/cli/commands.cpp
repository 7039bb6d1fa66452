// The table of subcommands, and those that only print: backends, knobs, version.
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "backend/backend.h"
#include "base/own_variables.h"
#include "cli/command.h"
#include "cli/knobs_table.h"

namespace maniple::cli {
namespace {

int print_backends() {
  fmt::print("{:<8} {:<8} {:<68} how to get it\n", "backend", "state", "what it is");
  for (const BackendEntry& entry : backends()) {
    const std::string missing = entry.missing();
    fmt::print("{:<8} {:<8} {:<68} {}\n", entry.name, missing.empty() ? "here" : "missing", entry.sentence,
               missing.empty() ? "-" : missing);
  }
  return 0;
}

/// 0: not a terminal.
std::size_t terminal_width() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

int print_knobs() {
  fmt::print("{}", knobs_table(environment_text, terminal_width()));
  const auto unknown = unknown_variables();
  if (!unknown.empty()) fmt::print("\n{}\n", describe_unknown(unknown));
  return 0;
}

int print_version() {
  fmt::print("maniple {}\n", MANIPLE_VERSION);
  return 0;
}

template <int (*print)()>
std::function<int()> without_options(CLI::App&) {
  return print;
}

}  // namespace

std::span<const Command> commands() noexcept {
  static constexpr Command kCommands[] = {
      {"run", "start a program as the ranks of a job, on this machine or on many", declare_run},
      {"ps", "list this user's running jobs", declare_ps},
      {"doctor", "look for what usually goes wrong on a machine, and say how to fix it", declare_doctor},
      {"backends", "list the backends: what each is, whether it is installed, how to get it",
       without_options<print_backends>},
      {"bench", "measure the operations, next to this machine's limits and other libraries", declare_bench},
      {"knobs", "list the MANIPLE_ variables that change behaviour", without_options<print_knobs>},
      {"version", "print the version", without_options<print_version>},
      {"bench-worker", "", declare_bench_worker},
      {"run-agent", "", declare_run_agent},
  };
  return kCommands;
}

}  // namespace maniple::cli
