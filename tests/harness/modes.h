// The implementations of run_ranks, one file each: threads.cpp, processes.cpp, child.cpp.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "harness/run_ranks.h"

namespace maniple::harness {

using Body = std::function<void(Rank&)>;

RunResult run_as_threads(const RunOptions& options, const Body& body);

/// The parent's part: starts the children, which reach their `body` by running the test.
RunResult run_as_processes(const RunOptions& options, int run_index);

/// The settings that a child gets through its environment.
struct ChildMode {
  int rank = 0;
  int run_index = 0;
  int channel = -1;  ///< descriptor; -1: started by mpirun
  std::string dir;
  std::string init_method;
  std::string hosts;  ///< addresses, separated by commas
};
const std::optional<ChildMode>& child_mode();
std::string encode(const ChildMode& mode);
inline constexpr const char* kChildVariable = "MANIPLE_TEST_CHILD";

/// The child's part: runs the body and ends the process.
[[noreturn]] void run_as_child(const RunOptions& options, const ChildMode& mode, const Body& body);

/// A rank's InitOptions, without the options that depend on the mode.
InitOptions init_options(const RunOptions& options, int rank);

/// The host of a rank; ranks are assigned in blocks.
int host_of(const RunOptions& options, int rank);

bool may_die(const RunOptions& options, int rank);

}  // namespace maniple::harness
