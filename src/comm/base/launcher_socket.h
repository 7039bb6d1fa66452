// The socket by which a rank talks to the launcher that started it: notices of init() (comm/rendezvous/rendezvous.h)
// and failure reports (comm/base/error_codec.h).
//
// The launcher names it in the environment, as "NUMBER:INODE". A program that a rank starts may inherit the variable
// without the socket, and have a file of its own under that number; the inode tells the two apart. So the first process
// that uses the socket also removes the variable and closes the socket in programs that it starts.
#pragma once

#include <string>

namespace maniple {

inline constexpr const char* kInitSocket = "MANIPLE_INIT_FD";
inline constexpr const char* kReportSocket = "MANIPLE_REPORT_FD";

/// The value for such a variable.
std::string launcher_socket_value(int fd);

/// The descriptor of the variable's socket; -1: none, not the one that the launcher opened, or this is a child of
/// fork(), which is not the rank. Removes the variable from the environment; later calls return the same.
int launcher_socket(const char* variable) noexcept;

}  // namespace maniple
