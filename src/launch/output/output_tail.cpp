#include "launch/output/output_tail.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

namespace maniple::launch {
namespace {

constexpr std::string_view kCut = " ...";

std::string readable(std::string_view line) {
  std::string text(line.substr(0, OutputTail::kLineBytes));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' && c != '\t') c = ' ';
  }
  if (line.size() > text.size()) text += kCut;
  return text;
}

constexpr std::string_view kWhat = "  what():  ";  // printed by the C++ library for an uncaught exception

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

// How likely a line is to name the reason for a failure. The last line with the highest rating is shown.
constexpr int kNone = 0, kLine = 1, kWhatLine = 2, kMessage = 3;

int rate_error_line(std::string_view line) {
  if (line.starts_with(kWhat)) return kWhatLine;
  // "ValueError: ...", "torch.cuda.OutOfMemoryError: ...", "error: ..."
  const auto colon = line.find(": ");
  if (colon == std::string_view::npos) return kNone;
  const std::string_view word = line.substr(0, colon);
  if (word.find(' ') != std::string_view::npos) return kNone;
  for (const std::string_view ending : {"Error", "Exception", "error", "fatal", "FATAL", "ERROR"}) {
    if (word.ends_with(ending)) return kLine;
  }
  return kNone;
}

}  // namespace

void OutputTail::look_for_error(std::string_view line) {
  if (begins_stack(line)) {
    const std::string& first = opening_.empty() ? before_ : opening_;
    if (!first.empty()) error_ = first;
    if (!first.empty()) rating_ = kMessage;
    opening_.clear();
  } else if (const int rating = rate_error_line(line); rating > kNone && rating >= rating_) {
    rating_ = rating;
    error_ = readable(without_what(line));
  }
  if (line.starts_with(kWhat)) opening_ = readable(without_what(line));
  before_ = readable(line);
}

void OutputTail::stop_looking() {
  looks_ = false;
  error_.clear();
}

void OutputTail::take(std::string_view lines, bool errors) {
  for (std::string_view rest = errors && looks_ ? lines : std::string_view(); !rest.empty();) {
    const auto end = std::min(rest.find('\n'), rest.size());
    look_for_error(rest.substr(0, std::min(end, 4 * kLineBytes)));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  // Backwards, because only the end of a long output matters.
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

std::vector<std::string> OutputTail::lines(const std::string& error) const {
  std::vector<std::string> lines;
  const std::string shown = readable(std::string_view(error).substr(0, error.find('\n')));
  for (const std::string& line : lines_) {
    const std::string plain = readable(without_what(line));
    const bool same =
        plain == shown || (plain.ends_with(kCut) && error.starts_with(plain.substr(0, plain.size() - kCut.size())));
    if (error.empty() || !same) lines.push_back(line);
  }
  return lines;
}

namespace {

/// Identifies an error that several ranks may report; empty: every report is shown.
std::string name_of(const ErrorInfo& error) {
  if (error.kind == ErrorKind::peer_lost && !error.ranks.empty())
    return fmt::format("loss of rank {}", error.ranks.front());
  if (error.kind == ErrorKind::mismatch && error.sequence > 0)
    return fmt::format("mismatch in call #{} of group {}", error.sequence, error.group);
  return {};
}

}  // namespace

bool RepeatedErrors::report(int by, const ErrorInfo& error) {
  repeated_.erase(by);
  const std::string name = name_of(error);
  if (name.empty()) return false;
  if (errors_.try_emplace(name, Reported{.first = by, .others = {}}).first->second.first == by) return false;
  repeated_[by] = name;
  return true;
}

void RepeatedErrors::failed(int by) {
  if (shown_.count(by) != 0) return;
  if (const auto it = repeated_.find(by); it != repeated_.end()) errors_.at(it->second).others.insert(by);
}

void RepeatedErrors::shown(int by) {
  shown_.insert(by);
  for (auto& [name, error] : errors_) error.others.erase(by);
}

std::string RepeatedErrors::summary() {
  std::string text;
  for (auto& [name, error] : errors_) {
    if (error.others.empty()) continue;
    text += fmt::format("{}maniple: rank{} {} reported the same {}", text.empty() ? "" : "\n",
                        error.others.size() == 1 ? "" : "s", fmt::join(error.others, ", "), name);
    error.others.clear();
  }
  return text;
}

}  // namespace maniple::launch
