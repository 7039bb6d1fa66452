// Descriptors for the processes that this process starts: pipes, sockets, sealed memory, reserved ports. All are above
// 2, and close-on-exec until a child inherits them (StartOptions::inherited).
#pragma once

#include <sys/socket.h>

#include <string_view>
#include <utility>

#include "comm/base/unique_fd.h"
#include "comm/net/address.h"

namespace maniple::launch {

/// The same open file under a number above 2. Throws SystemError.
UniqueFd above_standard(UniqueFd fd);

/// Returns the reading end, then the writing end.
std::pair<UniqueFd, UniqueFd> make_pipe();

/// A connected socket pair. Unlike pipes, sockets can be written with MSG_NOSIGNAL, without SIGPIPE if the peer is
/// gone.
std::pair<UniqueFd, UniqueFd> make_socket_pair(int type = SOCK_STREAM);

/// An anonymous file that holds `bytes` and is sealed against changes.
UniqueFd sealed_memory(const char* name, std::string_view bytes);

/// Binds a port (0: any free one) without listening on it. No other process gets the port, but rank 0 can listen there
/// because it sets SO_REUSEADDR, too. Throws SystemError naming the process that holds the port.
UniqueFd reserve_port(const Address& address);

}  // namespace maniple::launch
