#include "launch/output/log_pump.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include <fmt/format.h>

#include "comm/base/system_error.h"
#include "comm/base/write_all.h"

namespace maniple::launch {
LogFile::LogFile(const std::string& path, bool append, std::function<void(std::string)> warn)
    : path_(path), warn_(std::move(warn)) {
  const int mode = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (append ? 0 : O_TRUNC);
  file_.reset(::open(path.c_str(), mode, 0666));
  if (!file_) warn_(fmt::format("maniple: warning: no log file {}: {}", path, errno_text(errno)));
}

void LogFile::write(std::string_view bytes) {
  if (!file_ || write_all(file_.get(), bytes) == bytes.size()) return;
  warn_(fmt::format("maniple: warning: {} ends here, the job goes on: {}", path_, errno_text(errno)));
  file_.reset();
}

LogPump::LogPump(Console& console, Route route, std::shared_ptr<OutputTail> tail, std::shared_ptr<LogFile> file)
    : console_(console), route_(std::move(route)), tail_(std::move(tail)), file_(std::move(file)) {}

void LogPump::take(std::string_view bytes) {
  if (file_) file_->write(bytes);
  const auto last = bytes.rfind('\n');
  if (last == std::string_view::npos) {
    partial_.append(bytes);
  } else {
    if (!partial_.empty()) {
      const auto first = bytes.find('\n');
      partial_.append(bytes.substr(0, first + 1));
      bytes.remove_prefix(first + 1);
      take_lines(partial_);
      partial_.clear();
    }
    const auto end = bytes.rfind('\n');
    const std::size_t whole = end == std::string_view::npos ? 0 : end + 1;
    take_lines(bytes.substr(0, whole));
    partial_.append(bytes.substr(whole));
  }
  // On a terminal a progress bar ends its "lines" with a carriage return.
  if (route_.shown && stream().terminal() && !partial_.empty()) {
    if (const auto back = partial_.rfind('\r'); back != std::string::npos && back + 1 < partial_.size()) {
      const auto before = back == 0 ? std::string::npos : partial_.rfind('\r', back - 1);
      const std::size_t begin = before == std::string::npos ? 0 : before + 1;
      take_lines(partial_.substr(begin, back - begin) + "\n");
      partial_.erase(0, back + 1);
    }
  }
  if (partial_.size() > kLongestLine) {
    take_lines(partial_ + "\n");
    partial_.clear();
  }
  if (route_.shown) stream().flush();
}

void LogPump::take_lines(std::string_view lines) {
  if (lines.empty()) return;
  tail_->take(lines, route_.to_err);
  if (!route_.shown || display_ == Display::dropped) return;
  if (display_ == Display::shown) return show_lines(lines);
  if (display_ == Display::filtered) return show_other_lines(lines);
  held_.append(lines);
  if (held_.size() > kMostHeld) show();
}

void LogPump::show() {
  display_ = Display::shown;
  if (held_.empty()) return;
  show_lines(held_);
  held_.clear();
  stream().flush();
}

void LogPump::drop_repeats(std::string_view error) {
  // Long lines may be shown in pieces, and a report may be cut.
  constexpr std::size_t kEnough = 400;
  repeated_ = error.substr(0, std::min(error.find('\n'), kEnough));
  if (repeated_.empty()) return show();
  display_ = Display::filtered;
  show_other_lines(std::exchange(held_, {}));
  stream().flush();
}

void LogPump::show_other_lines(std::string_view lines) {
  while (!lines.empty()) {
    const std::string_view line = lines.substr(0, lines.find('\n') + 1);
    lines.remove_prefix(line.size());
    if (line.find(repeated_) == std::string_view::npos) show_lines(line);
  }
}

// An uncaught exception prints two lines. Longer output contains more than the error.
void LogPump::drop() {
  constexpr auto kLinesOfAnError = 2;
  if (std::count(held_.begin(), held_.end(), '\n') > kLinesOfAnError) return show();
  display_ = Display::dropped;
}

void LogPump::show_lines(std::string_view lines) {
  console_.make_room();
  if (route_.prefix.empty()) {
    stream().append(lines);
    return;
  }
  while (!lines.empty()) {
    const std::size_t end = lines.find('\n') + 1;
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(end);
    stream().append(route_.prefix);
    stream().append(line);
  }
}

void LogPump::finish() {
  if (partial_.empty()) return;
  partial_.push_back('\n');
  take_lines(partial_);
  partial_.clear();
  if (route_.shown) stream().flush();
}

}  // namespace maniple::launch
