// Opens connections to other ranks of the job and accepts theirs. All are authenticated.
//
// A data connection carries bytes from the rank that connected to the rank that accepted (and back: see mesh.h); its
// topic says which group, use (collectives or messages) and stream it is for. One connector serves all groups of a
// process's rank.
#pragma once

#include <string>

#include "comm/base/abort_signal.h"
#include "comm/net/secure_connection.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class Connector {
 public:
  virtual ~Connector() = default;

  /// A TCP connection to `global_rank`; blocks until the peer's acceptor has taken it (which happens in its background
  /// thread, so the peer need not be waiting). Throws PeerLost, Timeout, or the abort's cause.
  virtual SecureConnection dial(int global_rank, const std::string& topic, Deadline deadline,
                                const AbortSignal& abort) = 0;

  /// The connection that `global_rank` dialled or will dial with this topic. Does not block: returns an empty one
  /// until it has arrived.
  virtual SecureConnection try_take(int global_rank, const std::string& topic) = 0;

  /// Readable whenever a data connection has arrived since the last `try_take` (a hint to look again).
  virtual int arrival_fd() const noexcept = 0;
};

}  // namespace maniple
