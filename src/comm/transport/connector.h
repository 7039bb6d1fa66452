// Opens connections to other ranks of the job and accepts connections from them. All are authenticated.
//
// A data connection carries bytes from the rank that dialled to the rank that accepted (and back: see mesh.h). Its
// topic names the group, the use (collectives or messages) and the stream. All groups of a rank share one connector.
#pragma once

#include <string>

#include "comm/base/abort_signal.h"
#include "comm/net/secure_connection.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class Connector {
 public:
  virtual ~Connector() = default;

  /// Opens a TCP connection to `global_rank`. Blocks until the peer's acceptor has taken it; the acceptor runs in a
  /// background thread, so the peer need not be waiting. Throws PeerLost, Timeout, or the abort's cause.
  virtual SecureConnection dial(int global_rank, const std::string& topic, Deadline deadline,
                                const AbortSignal& abort) = 0;

  /// Takes the connection that `global_rank` dialled with this topic. Does not block: returns an empty connection if it
  /// has not arrived yet.
  virtual SecureConnection try_take(int global_rank, const std::string& topic) = 0;

  /// Readable when a data connection has arrived since the last `try_take` (a hint to try again).
  virtual int arrival_fd() const noexcept = 0;
};

}  // namespace maniple
