// The sockets by which a rank reports to the launcher that started it: notices of init() (comm/rendezvous/rendezvous.h)
// and failure reports (comm/base/error_codec.h).
//
// The launcher passes each socket in an environment variable, as "NUMBER:INODE". A program started by a rank may
// inherit the variable without the socket, and use that descriptor number for a file of its own; the inode detects this
// case. The first process that uses the socket removes the variable and sets FD_CLOEXEC, so the programs it starts get
// neither.
#pragma once

#include <string>

namespace maniple {

inline constexpr const char* kInitSocket = "MANIPLE_INIT_FD";
inline constexpr const char* kReportSocket = "MANIPLE_REPORT_FD";

/// The variable's value for the socket `fd`.
std::string launcher_socket_value(int fd);

/// Returns the socket named by `variable`, or -1: the variable is not set, its descriptor is not the socket the
/// launcher opened, or this process is a child of fork() and therefore not the rank. Removes the variable from the
/// environment; later calls return the same descriptor.
int launcher_socket(const char* variable) noexcept;

}  // namespace maniple
