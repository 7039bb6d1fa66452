#include <maniple/comm/error.h>

#include <cstdio>
#include <cstdlib>
#include <system_error>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"

namespace maniple {

std::string errno_text(int code) { return std::system_category().message(code); }

std::string start_error_text(int code) {
  if (code != EAGAIN) return errno_text(code);
  return fmt::format(
      "{}: the limit of processes and threads is reached, for this user (ulimit -u) or its control "
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
