// A payload being sent or received in a frame, and the rank at the other end of its connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "comm/call/signature.h"
#include <maniple/comm/error.h>

namespace maniple {

struct Transfer {
  const Signature* signature = nullptr;  ///< the collective's, which outlives the transfer; null: a message
  DType dtype{};                         ///< messages only
  std::int32_t tag = 0;                  ///< messages only
  const std::byte* from = nullptr;       ///< source of a send
  std::byte* to = nullptr;               ///< destination of a receive
  std::size_t size = 0;
  std::size_t moved = 0;            ///< bytes of payload sent or received so far
  std::uint64_t segments_left = 1;  ///< pieces, or the whole payload
  std::uint8_t streams = 1;
  bool pieced = false;
  bool checked = false;
  bool done = false;

  std::string describe() const;  ///< "all_reduce #12 float32[1000] sum", "send float32[1000] tag 3"
};

/// Sums over several transfers: bytes moved so far, and bytes in all.
struct TransferProgress {
  std::size_t moved = 0;
  std::size_t expected = 0;
};
TransferProgress progress_of(const std::deque<Transfer*>& transfers);

/// The other rank, as named in errors.
struct Peer {
  int rank = 0;         ///< in the group
  int global_rank = 0;  ///< in the world

  std::string name() const;  ///< "rank 3", or "rank 3 (global rank 7)" where the two differ

  /// Makes an error that names the lost peer, the progress of the posted transfers (may be empty), and the channel's
  /// reason.
  PeerLost lost(const std::string& progress, const SystemError& error, TransferProgress bytes = {}) const;
};

/// "3.0 of 8.0 MiB", "12 of 4096 B"
std::string bytes_of(std::size_t moved, std::size_t expected);

}  // namespace maniple
