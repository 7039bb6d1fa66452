// Counting what hooks send; see HookTraffic.
#pragma once

#include <cstddef>

#include <maniple/train/hook_traffic.h>

namespace maniple {

/// What a rank of n sends in an all_reduce of so many bytes.
inline std::uint64_t all_reduce_sends(std::uint64_t bytes, int n) noexcept {
  return 2 * bytes * static_cast<std::uint64_t>(n - 1) / static_cast<std::uint64_t>(n);
}

inline void count_plain(HookTraffic& traffic, std::uint64_t bytes, int n) noexcept {
  traffic.plain_bytes += all_reduce_sends(bytes, n);
}

inline void count_all_reduce(HookTraffic& traffic, std::uint64_t bytes, int n) noexcept {
  traffic.sent_bytes += all_reduce_sends(bytes, n);
}

}  // namespace maniple
