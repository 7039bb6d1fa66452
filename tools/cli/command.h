// A subcommand of `maniple`: one file that declares its options and runs, and one line in commands(). The small ones
// are in commands.cpp.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "comm/base/environment.h"

namespace CLI {
class App;
}

namespace maniple::cli {

struct Command {
  const char* name;
  const char* summary;  ///< empty: not shown by --help (internal)
  /// Adds options to `app` and returns what to do once they are parsed; its result is the exit code.
  std::function<int()> (*declare)(CLI::App& app);
};

std::span<const Command> commands() noexcept;

/// Exit codes, beside 0.
inline constexpr int kFailed = 1;  ///< the command failed
inline constexpr int kUsage = 2;   ///< the command line is invalid
inline constexpr int kInterrupted = 130;

/// What stands for `--` where a command takes a program: no word that the parser takes for an option.
inline constexpr const char* kEndOfOptions = "\1--";

std::function<int()> declare_bench(CLI::App& app);
std::function<int()> declare_bench_worker(CLI::App& app);
std::function<int()> declare_checkpoint(CLI::App& app);
std::function<int()> declare_doctor(CLI::App& app);
std::function<int()> declare_run(CLI::App& app);
std::function<int()> declare_run_agent(CLI::App& app);
std::function<int()> declare_ps(CLI::App& app);

// The table of `maniple knobs`, for a terminal of any width. Pure: environment and width are arguments.

/// Narrow terminals get the meaning below the values, wide ones beside them; `width` 0: every knob is one line, for
/// grep. What `read` finds set is shown behind the meaning.
std::string knobs_table(const ReadVariable& read, std::size_t width);

}  // namespace maniple::cli
