// Copies results that are too large for the caches.
#pragma once

#include <cstddef>

namespace maniple {

/// Whether results of `bytes` bytes on each of `ranks` ranks of a host, together with their sources, evict each other
/// from the caches. Always false on Arm, where processors detect writes of whole lines and streaming stores gain
/// nothing.
bool exceeds_caches(std::size_t bytes, int ranks) noexcept;

/// std::memcpy with streaming stores, which bypass the caches. Ordinary stores make the processor read each line of
/// `to` before overwriting it: a third of the memory traffic of the copy.
void copy_past_caches(void* to, const void* from, std::size_t bytes) noexcept;

}  // namespace maniple
