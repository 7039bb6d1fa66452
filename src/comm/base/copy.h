// Copies of results that are too large for the caches.
#pragma once

#include <cstddef>

namespace maniple {

/// Whether results of so many bytes on each of the ranks of a host, with what they are made of, push each other out of
/// the caches. Never where processors see by themselves that whole lines are written (Arm): there nothing is gained.
bool exceeds_caches(std::size_t bytes, int ranks) noexcept;

/// std::memcpy, by stores that go past the caches. Others have the processor read each line of `to` before it is
/// overwritten: a third of what the copy moves.
void copy_past_caches(void* to, const void* from, std::size_t bytes) noexcept;

}  // namespace maniple
