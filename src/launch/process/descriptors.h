// Descriptors for the processes that this one starts: pipes, sockets, sealed memory, reserved ports. None is one of the
// standard three; all are close-on-exec until a child inherits them (StartOptions::inherited).
#pragma once

#include <sys/socket.h>

#include <string_view>
#include <utility>

#include "comm/base/unique_fd.h"
#include "comm/net/address.h"

namespace maniple::launch {

/// The same open file under a number above 2. Throws SystemError.
UniqueFd above_standard(UniqueFd fd);

/// Reading end, writing end.
std::pair<UniqueFd, UniqueFd> make_pipe();

/// Two ends; sending to one whose other end is gone can be done without a signal (MSG_NOSIGNAL).
std::pair<UniqueFd, UniqueFd> make_socket_pair(int type = SOCK_STREAM);

/// A file without a name that holds `bytes`, which nobody can change any more.
UniqueFd sealed_memory(const char* name, std::string_view bytes);

/// Binds a port (0: any free one) without listening on it: nobody else gets it, but rank 0, which sets SO_REUSEADDR as
/// well, can listen there. Throws SystemError, which names the process that has the port.
UniqueFd reserve_port(const Address& address);

}  // namespace maniple::launch
