// One posted message, sent or received, and how far it has got.
#pragma once

#include <cstddef>
#include <cstdint>

#include "call/signature.h"

namespace maniple {

struct Transfer {
  const Signature* signature = nullptr;  ///< of the call; outlives the transfer
  const std::byte* from = nullptr;       ///< of a sent message
  std::byte* to = nullptr;               ///< of a received one
  std::size_t size = 0;
  std::size_t moved = 0;            ///< bytes of payload that have left or come
  std::uint64_t segments_left = 1;  ///< pieces, or the whole
  std::uint8_t streams = 1;
  bool pieced = false;
  bool checked = false;
  bool done = false;
};

}  // namespace maniple
