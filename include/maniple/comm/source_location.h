// SourceLocation: where a call was made; std::source_location for compilers that lack it (Clang before 16).
#pragma once

#include <maniple/export.h>

namespace MANIPLE_API maniple {

class SourceLocation {
 public:
  constexpr SourceLocation() = default;

  /// Call it without arguments: its defaults describe the caller, and as a default argument of a function, that
  /// function's caller.
  static constexpr SourceLocation current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE(),
                                          const char* function = __builtin_FUNCTION()) noexcept {
    SourceLocation where;
    where.file_ = file;
    where.line_ = line;
    where.function_ = function;
    return where;
  }

  constexpr bool is_empty() const noexcept { return line_ == 0 && *file_ == '\0'; }

  /// This place, or `other` if this one is empty.
  constexpr const SourceLocation& or_else(const SourceLocation& other) const noexcept {
    return is_empty() ? other : *this;
  }

  /// If line() is 0, the name of a call that the library made itself, "in Checkpoint::save (train.cpp:40)", or empty if
  /// the place is unknown.
  constexpr const char* file_name() const noexcept { return file_; }
  constexpr unsigned line() const noexcept { return line_; }
  constexpr const char* function_name() const noexcept { return function_; }

 private:
  const char* file_ = "";
  unsigned line_ = 0;
  const char* function_ = "";
};

}  // namespace maniple
