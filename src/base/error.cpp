#include <maniple/comm/error.h>

#include <cstdio>
#include <cstdlib>
#include <system_error>

#include <fmt/format.h>

#include "base/check.h"
#include "base/system_error.h"

namespace maniple {

const char* to_string(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::invalid_argument: return "InvalidArgument";
    case ErrorKind::timeout: return "Timeout";
    case ErrorKind::peer_lost: return "PeerLost";
    case ErrorKind::aborted: return "Aborted";
    case ErrorKind::mismatch: return "Mismatch";
    case ErrorKind::protocol: return "ProtocolError";
    case ErrorKind::system: return "SystemError";
    case ErrorKind::unsupported: return "Unsupported";
  }
  return "Error";
}

std::string describe(const ErrorInfo& info) {
  if (info.operation.empty()) return info.reason;
  std::string text = "[" + info.operation;
  if (info.sequence != 0) text += fmt::format(" #{}", info.sequence);
  if (!info.arguments.empty()) text += " " + info.arguments;
  return text + fmt::format(" {} rank {}/{}] {}", info.group, info.rank, info.size, info.reason);
}

std::string errno_text(int code) { return std::system_category().message(code); }

std::string start_error_text(int code) {
  if (code != EAGAIN) return errno_text(code);
  return fmt::format(
      "{}: the limit of processes and threads is reached, that of this user (ulimit -u) or of its control "
      "group (pids.max); start fewer, or raise it",
      errno_text(code));
}

void throw_system_error(const std::string& what, int code) {
  throw SystemError(fmt::format("{}: {}", what, errno_text(code)), code);
}

void assertion_failed(const char* condition, const char* file, int line) noexcept {
  std::fprintf(stderr, "maniple: internal error, please report it: %s at %s:%d\n", condition, file, line);
  std::abort();
}

}  // namespace maniple
