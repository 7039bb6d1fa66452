// The two checks. MANIPLE_REQUIRE is for the caller's mistakes: always on, throws InvalidArgument, tested.
// MANIPLE_ASSERT is for our own bugs: always on, ends the process with file and line, because state is unknown. The
// file has no folder: it would be one of the machine that built the library.
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
