// Sleeping on a word of shared memory, across processes.
#pragma once

#include <atomic>
#include <cstdint>

#include <maniple/comm/deadline.h>

namespace maniple {

/// Sleeps while `word` holds `expected`, at most until the deadline. May return early for no reason.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, Deadline deadline) noexcept;

/// Wakes everyone who sleeps on `word`.
void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept;

}  // namespace maniple
