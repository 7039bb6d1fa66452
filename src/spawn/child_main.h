// The other side of spawn: how a process that was started by it finds its function and runs it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <maniple/launch/spawn.h>

namespace maniple::launch {

/// A function's address, in a form that another run of the same program understands: its distance from where the program was
/// loaded, which is a different place every time (position-independent programs). Throws InvalidArgument when the address lies
/// in a shared library, which may be loaded somewhere else, or not at all.
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

/// Whether this program, started again, would find its way here: false when it is linked statically.
bool takeover_is_possible() noexcept;

/// Calls the function and reports; the result is the exit code.
int run_spawned(detail::SpawnEntry entry, void (*function)(), std::string_view arguments, int index, int report);

}  // namespace maniple::launch
