#include "launch/output/log_pump.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include <fmt/format.h>

#include "base/system_error.h"
#include "process/failure_report.h"

namespace maniple::launch {
namespace {

/// For a report on a terminal: no control characters, not too long.
std::string readable(std::string_view line) {
  std::string text(line.substr(0, LastWords::kLineBytes));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' && c != '\t') c = ' ';
  }
  if (line.size() > text.size()) text += " ...";
  return text;
}

constexpr std::string_view kWhat = "  what():  ";  // what the C++ library says of an exception that nobody caught

std::string_view without_what(std::string_view line) {
  return line.starts_with(kWhat) ? line.substr(kWhat.size()) : line;
}

/// LibTorch's exceptions carry the stack in their text, after the message.
bool begins_stack(std::string_view line) { return line.starts_with("Exception raised from "); }

/// "frame #3: c10::Error::Error(...)", "#3 c10::Error::Error(...)", "C++ CapturedTraceback:"
bool is_frame(std::string_view line) {
  if (line.starts_with("frame #") || line.starts_with("C++ CapturedTraceback:")) return true;
  const bool numbered = line.size() > 1 && line[0] == '#' && line[1] >= '0' && line[1] <= '9';
  return numbered && line.find("::") != std::string_view::npos;
}

}  // namespace

void LastWords::look_for_error(std::string_view line) {
  constexpr int kHighest = 3;
  if (begins_stack(line)) {
    const std::string& first = opening_.empty() ? before_ : opening_;
    if (!first.empty()) error_ = first;
    if (!first.empty()) rating_ = kHighest;
    opening_.clear();
  } else if (const int rating = rate_error_line(line); rating > 0 && rating >= rating_) {
    rating_ = rating;
    error_ = readable(without_what(line));
  }
  if (line.starts_with(kWhat)) opening_ = readable(without_what(line));
  before_ = readable(line);
}

void LastWords::take(std::string_view lines, bool errors) {
  for (std::string_view rest = errors ? lines : std::string_view(); !rest.empty();) {
    const auto end = std::min(rest.find('\n'), rest.size());
    look_for_error(rest.substr(0, std::min(end, 4 * kLineBytes)));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  // Backwards: of a flood only the end matters.
  std::deque<std::string> last;
  while (!lines.empty() && last.size() < kLines) {
    if (lines.back() == '\n') lines.remove_suffix(1);
    const auto before = lines.rfind('\n');
    const std::size_t begin = before == std::string_view::npos ? 0 : before + 1;
    const std::string_view line = lines.substr(begin);
    if (!line.empty() && !begins_stack(line) && !is_frame(line)) last.push_front(readable(line));
    lines = lines.substr(0, begin);
  }
  for (std::string& line : last) lines_.push_back(std::move(line));
  while (lines_.size() > kLines) lines_.pop_front();
}

std::vector<std::string> LastWords::tail() const {
  std::vector<std::string> lines;
  for (const std::string& line : lines_) {
    if (error_.empty() || without_what(line) != error_) lines.push_back(line);
  }
  return lines;
}

LogFile::LogFile(const std::string& path, bool append, std::function<void(std::string)> warn)
    : path_(path), warn_(std::move(warn)) {
  const int mode = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (append ? 0 : O_TRUNC);
  file_.reset(::open(path.c_str(), mode, 0666));
  if (!file_) warn_(fmt::format("maniple: warning: no log file {}: {}", path, errno_text(errno)));
}

void LogFile::write(std::string_view bytes) {
  while (file_ && !bytes.empty()) {
    const ssize_t wrote = ::write(file_.get(), bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      warn_(fmt::format("maniple: warning: {} ends here, the job goes on: {}", path_, errno_text(errno)));
      file_.reset();
      return;
    }
    bytes.remove_prefix(static_cast<std::size_t>(wrote));
  }
}

LogPump::LogPump(Console& console, Route route, std::shared_ptr<LastWords> words, std::shared_ptr<LogFile> file)
    : console_(console), route_(std::move(route)), words_(std::move(words)), file_(std::move(file)) {}

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
  words_->take(lines, route_.to_err);
  if (!route_.shown) return;
  console_.make_room();
  if (route_.prefix.empty() && !route_.repeated) {
    stream().append(lines);
    return;
  }
  while (!lines.empty()) {
    const std::size_t end = lines.find('\n') + 1;
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(end);
    if (route_.repeated && route_.repeated(line.substr(0, end - 1))) continue;
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
