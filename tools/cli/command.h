// A subcommand of `maniple`. Each one has a file that declares its options and runs it, and one line in commands().
// Small subcommands are in commands.cpp.
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
  /// Adds options to `app` and returns the function to run once they are parsed. That function returns the exit code.
  std::function<int()> (*declare)(CLI::App& app);
};

std::span<const Command> commands() noexcept;

/// Exit codes other than 0.
inline constexpr int kFailed = 1;  ///< the command failed
inline constexpr int kUsage = 2;   ///< the command line is invalid
inline constexpr int kInterrupted = 130;

/// Replaces `--` where a command takes a program, because the parser does not take this word for an option.
inline constexpr const char* kEndOfOptions = "\1--";

std::function<int()> declare_bench(CLI::App& app);
std::function<int()> declare_bench_worker(CLI::App& app);
std::function<int()> declare_checkpoint(CLI::App& app);
std::function<int()> declare_doctor(CLI::App& app);
std::function<int()> declare_resize(CLI::App& app);
std::function<int()> declare_run(CLI::App& app);
std::function<int()> declare_run_agent(CLI::App& app);
std::function<int()> declare_ps(CLI::App& app);

/// The table of `maniple knobs`. Narrow terminals get the meaning below the values, wide terminals next to them.
/// `width` 0: one line per knob, for grep. Variables that `read` finds set are shown after the meaning. Pure.
std::string knobs_table(const ReadVariable& read, std::size_t width);

}  // namespace maniple::cli
