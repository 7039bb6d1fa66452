// `maniple knobs`: the variables that change behaviour, and what is set of them.
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "base/own_variables.h"
#include "cli/command.h"
#include "cli/knobs_table.h"

namespace maniple::cli {
namespace {

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

}  // namespace

std::function<int()> declare_knobs(CLI::App&) { return print_knobs; }

}  // namespace maniple::cli
