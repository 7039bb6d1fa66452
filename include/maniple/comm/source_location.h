// Where a call was made: std::source_location for compilers that do not have it yet (Clang before 16).
#pragma once

#include <maniple/export.h>

namespace MANIPLE_API maniple {

class SourceLocation {
 public:
  constexpr SourceLocation() = default;

  /// Leave the arguments alone: as defaults they describe the caller, also through default arguments of the caller.
  static constexpr SourceLocation current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE(),
                                          const char* function = __builtin_FUNCTION()) noexcept {
    SourceLocation where;
    where.file_ = file;
    where.line_ = line;
    where.function_ = function;
    return where;
  }

  /// With line() 0: how the library names a call of its own, "in Checkpoint::save (train.cpp:40)"; or empty, where
  /// nothing is known.
  constexpr const char* file_name() const noexcept { return file_; }
  constexpr unsigned line() const noexcept { return line_; }
  constexpr const char* function_name() const noexcept { return function_; }

 private:
  const char* file_ = "";
  unsigned line_ = 0;
  const char* function_ = "";
};

}  // namespace maniple
