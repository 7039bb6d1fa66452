// A child of fork() has our memory but not our threads. Objects remember the generation they were made in and do nothing in
// another one.
#pragma once

#include <cstdint>

namespace maniple {

/// 0 in the original process, larger in children of fork().
std::uint32_t fork_generation() noexcept;

}  // namespace maniple
