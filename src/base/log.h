// Lines for people, on standard error: "maniple: warning: ...". MANIPLE_LOG sets the level.
#pragma once

#include <string>
#include <string_view>

#include "base/format.h"

namespace maniple {

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

/// The first call with this text in the process prints; later ones do not.
void warn_once(const std::string& text);

}  // namespace maniple
