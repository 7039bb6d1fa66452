// The child's side of spawn: how a process that was started by it finds its function, runs it, reports its end and
// notices that of its parent.
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

/// A function's address, in a form that another run of the same program understands: its distance from where the
/// program was loaded, which is a different place every time (position-independent programs). Throws InvalidArgument
/// when the address lies in a shared library, which may be loaded somewhere else, or not at all.
std::uint64_t offset_in_program(void (*function)());
/// The way back. Throws ProtocolError when nothing executable of the main program is there.
void (*function_at_offset(std::uint64_t offset))();

/// The variable that makes a program a spawned process: "payload,report,parent_pipe,index", three descriptors and a
/// number.
inline constexpr const char* kSpawnVariable = "MANIPLE_SPAWN_FD";

struct SpawnAssignment {
  int payload = -1;      ///< see encode_payload
  int report = -1;       ///< one end of a socket, for a SpawnReport
  int parent_pipe = -1;  ///< -1: not a daemon
  int index = 0;         ///< what the function is called with
};
std::string to_text(const SpawnAssignment& assignment);
std::optional<SpawnAssignment> parse_spawn_assignment(std::string_view text);

/// Which function, and its arguments. Throws InvalidArgument for a function outside of the main program.
std::string encode_payload(detail::SpawnEntry entry, void (*function)(), std::string_view arguments);

/// Whether this program, started again, would find its way here: false when it is linked statically, and when it links
/// the library without maniple::launch (take_over.cpp).
bool takeover_is_possible() noexcept;

/// Calls the function and reports; the result is the exit code.
int run_spawned(detail::SpawnEntry entry, void (*function)(), std::string_view arguments, int index, int report);

/// The report of a spawned process about its end, through a socket to its parent: that it has finished, or what it
/// threw.
struct SpawnReport {
  bool finished = false;                          ///< the function returned; the rest is empty
  std::int64_t when_ns = 0;                       ///< of the failure, on the clock that all processes share
  std::string type = {};                          ///< "std::runtime_error"
  std::string text = {};                          ///< what()
  std::optional<ErrorInfo> error = std::nullopt;  ///< if it was one of Maniple's
};

/// The exception that is being handled.
SpawnReport report_of_current_exception() noexcept;

std::string encode_report(const SpawnReport& report);
/// nullopt for anything that encode_report would not write, also for half of it.
std::optional<SpawnReport> decode_report(std::string_view bytes);

/// Fits into an empty socket, so that writing one never waits for its reader.
inline constexpr std::size_t kMostReportBytes = 32 * 1024;

// How a daemon notices the end of its parent: a pipe whose writing end only the parent has. The kernel closes it with
// the parent, however that ends, and sends SIGKILL to whoever has asked for it at the reading end.
//
// PR_SET_PDEATHSIG is not used, because it acts when the *thread* that started the child ends.

/// The parent's end. Copies of it in children of fork() are closed there, or they would keep the daemons alive.
class ParentPipe {
 public:
  ParentPipe();

  int child_end() const noexcept { return reading_.get(); }
  void close_child_end() noexcept { reading_.reset(); }

 private:
  UniqueFd reading_;
  UniqueFd writing_;
};

/// In the child: from now on this process dies with its parent; at once, if that is gone already.
void die_with_parent(int parent_pipe);

}  // namespace maniple::launch
