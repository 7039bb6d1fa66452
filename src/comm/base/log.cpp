#include "comm/base/log.h"

#include <unistd.h>

#include <set>

#include <fmt/format.h>

#include "comm/base/environment.h"
#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"

namespace maniple {
namespace {

LogLevel level_from_environment() {
  const std::string name = knob_text(Knob::log);  // init() and `maniple run` reject other words
  if (name == "debug") return LogLevel::debug;
  if (name == "info") return LogLevel::info;
  if (name == "error") return LogLevel::error;
  if (name == "off") return LogLevel::off;
  return LogLevel::warning;
}

constexpr std::string_view kNames[] = {"debug", "info", "warning", "error", ""};

struct Warned {
  Mutex mutex;
  std::set<std::string> texts MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<Warned> warned_texts;

}  // namespace

bool log_enabled(LogLevel level) noexcept {
  static const LogLevel kLevel = level_from_environment();
  return level >= kLevel;
}

void log_line(LogLevel level, std::string_view text) {
  // One write(2) per line, so that lines of several processes do not mix.
  const std::string line = fmt::format("maniple: {}: {}\n", kNames[static_cast<int>(level)], text);
  const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  (void)written;
}

void warn_once(const std::string& text) {
  {
    Warned& all = *warned_texts;
    const MutexLock lock(all.mutex);
    if (!all.texts.insert(text).second) return;
  }
  log_warning("{}", text);
}

void ThrottledLog::warn(std::string_view kind, const std::string& line) {
  const auto now = std::chrono::steady_clock::now();
  const auto found = last_.find(kind);
  if (found == last_.end()) {
    last_.emplace(std::string(kind), Last{now, 0});
    log_warning("{}", line);
    return;
  }
  Last& last = found->second;
  if (now - last.when < pause_) {
    ++last.left_out;
    return;
  }
  if (last.left_out == 0) {
    log_warning("{}", line);
  } else {
    log_warning("{} ({} more like it before)", line, last.left_out);
  }
  last = Last{now, 0};
}

}  // namespace maniple
