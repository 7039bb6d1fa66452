// The child's side of spawn: finds the function to run, runs it, reports its end, and notices when the parent ends.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "comm/base/unique_fd.h"
#include <maniple/comm/error.h>
#include <maniple/launch/spawn.h>

namespace maniple::launch {

/// A function's offset from the program's load address, which is valid in another run of the same program
/// (position-independent programs are loaded at a different address each time). Throws InvalidArgument when the
/// function lies in a shared library, which another run may load elsewhere or not at all.
std::uint64_t offset_in_program(void (*function)());
/// The inverse. Throws ProtocolError when the offset is not in the main program's executable code.
void (*function_at_offset(std::uint64_t offset))();

/// The variable that marks a spawned process: "payload,report,parent_pipe,index", three descriptors and a number.
inline constexpr const char* kSpawnVariable = "MANIPLE_SPAWN_FD";

struct SpawnAssignment {
  int payload = -1;      ///< see encode_payload
  int report = -1;       ///< socket end that carries a SpawnReport
  int parent_pipe = -1;  ///< -1: not a daemon
  int index = 0;         ///< the argument for the function
};
std::string to_text(const SpawnAssignment& assignment);
std::optional<SpawnAssignment> parse_spawn_assignment(std::string_view text);

/// Encodes the function and its arguments. Throws InvalidArgument for a function outside the main program.
std::string encode_payload(detail::SpawnEntry entry, void (*function)(), std::string_view arguments);

/// Whether a new run of this program would call the spawned function: false when it is linked statically, or links the
/// library without maniple::launch (take_over.cpp).
bool takeover_is_possible() noexcept;

/// Calls the function and reports its end. Returns the exit code.
int run_spawned(detail::SpawnEntry entry, void (*function)(), std::string_view arguments, int index, int report);

/// A spawned process's report to its parent, sent through a socket: that the function returned, or the exception it
/// threw.
struct SpawnReport {
  bool finished = false;                          ///< the function returned; the other fields are empty
  std::int64_t when_ns = 0;                       ///< time of the failure, on a clock that all processes share
  std::string type = {};                          ///< "std::runtime_error"
  std::string text = {};                          ///< what()
  std::optional<ErrorInfo> error = std::nullopt;  ///< if the exception was one of Maniple's
};

/// Describes the exception that is being handled.
SpawnReport report_of_current_exception() noexcept;

std::string encode_report(const SpawnReport& report);
/// nullopt for anything that encode_report would not write, including a truncated report.
std::optional<SpawnReport> decode_report(std::string_view bytes);

/// A report of this size fits into an empty socket buffer, so that writing it never blocks.
inline constexpr std::size_t kMostReportBytes = 32 * 1024;

// A daemon notices the end of its parent through a pipe whose writing end only the parent holds. The kernel closes it
// however the parent ends, and sends SIGKILL to the processes that have requested it at the reading end.
//
// PR_SET_PDEATHSIG is not used, because it acts when the *thread* that started the child ends.

/// The pipe, for the parent. Forked children close their copy of the writing end, which would keep the daemons alive.
class ParentPipe {
 public:
  ParentPipe();

  int child_end() const noexcept { return reading_.get(); }
  void close_child_end() noexcept { reading_.reset(); }

 private:
  UniqueFd reading_;
  UniqueFd writing_;
};

/// Call in the child: from now on this process dies with its parent, or immediately if the parent is already gone.
void die_with_parent(int parent_pipe);

}  // namespace maniple::launch
