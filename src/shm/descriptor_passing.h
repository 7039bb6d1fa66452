// Handing an open file to another process over a Unix socket.
#pragma once

#include <cstdint>

#include "base/unique_fd.h"
#include <maniple/comm/deadline.h>

namespace maniple {

/// One message: the descriptor and eight bytes about it. The socket's buffer is empty at that point, so this does not block.
void send_descriptor(int socket, int fd, std::uint64_t about);

struct ReceivedDescriptor {
  UniqueFd fd;
  std::uint64_t about = 0;
};
/// Throws Timeout, PeerLost-worthy SystemError at end of stream, ProtocolError when the message holds no descriptor, Aborted as
/// soon as `cancel` (a descriptor; -1: none) is readable.
ReceivedDescriptor receive_descriptor(int socket, Deadline deadline, int cancel = -1);

}  // namespace maniple
