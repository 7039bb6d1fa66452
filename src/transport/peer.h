// The rank at the other end of a lane, as errors name it.
#pragma once

#include <cstddef>
#include <string>

#include <maniple/comm/error.h>

namespace maniple {

struct Peer {
  int rank = 0;         ///< in the group
  int global_rank = 0;  ///< in the world

  std::string name() const;  ///< "rank 3", or "rank 3 (global rank 7)" where the two differ

  /// The lost peer, what had moved of what was posted, and the system's reason.
  PeerLost lost(const std::string& progress, const std::string& reason) const;
};

/// "3.0 of 8.0 MiB", "12 of 4096 B"
std::string bytes_of(std::size_t moved, std::size_t expected);

}  // namespace maniple
