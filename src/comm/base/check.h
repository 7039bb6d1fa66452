// Two checks, both always on. MANIPLE_REQUIRE rejects a caller's mistake: it throws InvalidArgument, and tests cover
// it. MANIPLE_ASSERT guards against bugs in Maniple: it prints file and line and aborts, because the state is unknown.
// The file is printed without its folder, which would be a folder on the build machine.
#pragma once

#include <maniple/comm/error.h>
#include <maniple/export.h>

#include "comm/base/format.h"

namespace MANIPLE_API maniple {
[[noreturn]] void assertion_failed(const char* condition, const char* file, int line) noexcept;
}  // namespace maniple

#define MANIPLE_REQUIRE(condition, ...)                                      \
  do {                                                                       \
    if (!(condition)) [[unlikely]]                                           \
      throw ::maniple::InvalidArgument(::maniple::format_text(__VA_ARGS__)); \
  } while (false)

#define MANIPLE_ASSERT(condition)                                       \
  do {                                                                  \
    if (!(condition)) [[unlikely]]                                      \
      ::maniple::assertion_failed(#condition, __FILE_NAME__, __LINE__); \
  } while (false)
