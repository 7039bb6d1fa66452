// SystemError from errno: "connect 10.0.0.1:29500: Connection refused".
#pragma once

#include <cerrno>
#include <string>

#include <maniple/comm/error.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

std::string errno_text(int code);
[[noreturn]] void throw_system_error(const std::string& what, int code = errno);

/// The error text of a process or thread that failed to start: for EAGAIN ("Resource temporarily unavailable") it names
/// the limit.
std::string start_error_text(int code);

}  // namespace maniple
