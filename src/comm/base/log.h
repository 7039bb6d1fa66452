// Log lines on standard error: "maniple: warning: ...". MANIPLE_LOG sets the level.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "comm/base/format.h"
#include <maniple/export.h>

namespace MANIPLE_API maniple {

enum class LogLevel { debug, info, warning, error, off };

bool log_enabled(LogLevel level) noexcept;
void log_line(LogLevel level, std::string_view text);

template <class... Args>
void log_debug(FormatPattern<std::type_identity_t<Args>...> pattern, const Args&... args) {
  if (log_enabled(LogLevel::debug)) log_line(LogLevel::debug, format_text(pattern, args...));
}
template <class... Args>
void log_info(FormatPattern<std::type_identity_t<Args>...> pattern, const Args&... args) {
  if (log_enabled(LogLevel::info)) log_line(LogLevel::info, format_text(pattern, args...));
}
template <class... Args>
void log_warning(FormatPattern<std::type_identity_t<Args>...> pattern, const Args&... args) {
  if (log_enabled(LogLevel::warning)) log_line(LogLevel::warning, format_text(pattern, args...));
}

/// Prints `text` as a warning the first time this process passes it.
void warn_once(const std::string& text);

/// Rate-limits warnings that unauthenticated peers can trigger at will. Prints at most one line per kind and `pause`,
/// with the number of lines suppressed since the last one.
class ThrottledLog {
 public:
  explicit ThrottledLog(std::chrono::steady_clock::duration pause = std::chrono::seconds(5)) : pause_(pause) {}

  /// `kind` must come from a fixed set, because each kind is remembered. Not thread-safe.
  void warn(std::string_view kind, const std::string& line);

 private:
  struct Last {
    std::chrono::steady_clock::time_point when;
    std::uint64_t left_out = 0;
  };
  std::chrono::steady_clock::duration pause_;
  std::map<std::string, Last, std::less<>> last_;
};

}  // namespace maniple
