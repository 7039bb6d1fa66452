// How much a communication hook saved.
#pragma once

#include <cstdint>

namespace maniple {

/// What this rank has sent to others by a hook, against what the plain average of the same gradients sends: an all_reduce
/// of B bytes over n ranks costs each of them 2 (n-1)/n B. (Ranks of one host exchange the same bytes in shared memory.)
struct HookTraffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t plain_bytes = 0;

  /// 4 means: a quarter of the bytes. 1 where nothing was sent.
  double compression_rate() const noexcept {
    return sent_bytes == 0 ? 1 : static_cast<double>(plain_bytes) / static_cast<double>(sent_bytes);
  }
};

}  // namespace maniple
