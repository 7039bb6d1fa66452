// Lines for people, on standard error: "maniple: warning: ...". MANIPLE_LOG sets the level.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace maniple {

enum class LogLevel { debug, info, warning, error, off };

bool log_enabled(LogLevel level) noexcept;
void log_line(LogLevel level, std::string_view text);

template <class... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::debug)) log_line(LogLevel::debug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::info)) log_line(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::warning)) log_line(LogLevel::warning, fmt::format(format, std::forward<Args>(args)...));
}

/// The first call with this text in the process prints; later ones do not.
void warn_once(const std::string& text);

}  // namespace maniple
