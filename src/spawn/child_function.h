// A function's address, in a form that another run of the same program understands: its distance from where the
// program was loaded, which is a different place every time (position-independent programs).
#pragma once

#include <cstdint>

namespace maniple::launch {

/// Throws InvalidArgument when the address lies in a shared library, which may be loaded somewhere else, or not at all.
std::uint64_t offset_in_program(void (*function)());

/// The way back. Throws ProtocolError when nothing executable of the main program is there.
void (*function_at_offset(std::uint64_t offset))();

}  // namespace maniple::launch
