#include <maniple/train/progress.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "base/check.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr auto kLongestSilence = std::chrono::seconds(30);
constexpr std::size_t kParts = 10;  // lines in a log, when nothing is slow
constexpr int kLogWidth = 110;
constexpr int kBarWidth = 30;

ProgressStyle style_for(const ProgressOptions& options) {
  if (options.style == ProgressStyle::silent) return options.style;
  if (options.only_rank_0 && is_initialized() && get_rank() != 0) return ProgressStyle::silent;
  if (options.style != ProgressStyle::automatic) return options.style;
  return ::isatty(::fileno(options.stream)) != 0 ? ProgressStyle::bar : ProgressStyle::lines;
}

int terminal_width(std::FILE* stream) {
  winsize size = {};
  const bool known = ::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<long long>(seconds + 0.5);
  if (whole < 100) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{}:{:02} min", whole / 60, whole % 60);
  return fmt::format("{}:{:02} h", whole / 3600, whole / 60 % 60);
}

double seconds_between(Progress::Clock::time_point from, Progress::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

Progress::Progress(std::size_t total, ProgressOptions options)
    : total_(total), options_(std::move(options)), start_(Clock::now()), drawn_(start_) {
  MANIPLE_REQUIRE(options_.stream != nullptr, "Progress: the stream is null");
  options_.style = style_for(options_);
  next_line_ = std::max<std::size_t>(1, (total + kParts - 1) / kParts);
}

Progress::~Progress() { finish(); }

double Progress::units_per_second() const {
  const double elapsed = seconds_between(start_, Clock::now());
  return elapsed > 0 ? static_cast<double>(amount_) / elapsed : 0;
}

bool Progress::is_due() const {
  if (options_.style == ProgressStyle::silent || finished_) return false;
  const auto since = Clock::now() - drawn_;
  if (options_.style == ProgressStyle::bar) return since >= kRedraw || steps_ + 1 == total_;
  return (total_ > 0 && steps_ + 1 >= next_line_) || since >= kLongestSilence;
}

void Progress::step(std::size_t amount, std::string_view note) {
  const bool due = is_due();
  ++steps_;
  amount_ += amount;
  if (!note.empty()) note_ = note;
  if (due) draw();
}

void Progress::finish() {
  if (finished_ || options_.style == ProgressStyle::silent) return;
  if (options_.style == ProgressStyle::bar) {
    draw();
    std::fputc('\n', options_.stream);
    std::fflush(options_.stream);
  } else if (total_ == 0 || steps_ < total_) {
    draw();  // the line of the last step has not been printed
  }
  finished_ = true;
}

std::string Progress::line(int width) const {
  const double elapsed = seconds_between(start_, Clock::now());
  std::string before = options_.label.empty() ? "" : options_.label + " ";
  std::string after;
  if (total_ > 0) {
    after += fmt::format(" {:3} % {}/{}", 100 * steps_ / total_, steps_, total_);
  } else {
    after += fmt::format("{}", steps_);
  }
  if (!options_.unit.empty()) after += fmt::format("  {:.0f} {}/s", units_per_second(), options_.unit);
  if (total_ > 0 && steps_ > 0 && steps_ < total_) {
    after += fmt::format("  {} left",
                         duration_text(elapsed / static_cast<double>(steps_) * static_cast<double>(total_ - steps_)));
  } else {
    after += fmt::format("  {}", duration_text(elapsed));
  }
  if (!note_.empty()) after += "  " + note_;

  std::string bar;
  const int room = std::min(kBarWidth, width - static_cast<int>(before.size() + after.size()) - 2);
  if (total_ > 0 && room >= 5) {
    const auto filled = static_cast<std::size_t>(room) * std::min(steps_, total_) / total_;
    bar = "[" + std::string(filled, '#') + std::string(static_cast<std::size_t>(room) - filled, '.') + "]";
  }
  std::string text = before + bar + after;
  if (options_.style == ProgressStyle::bar && text.size() > static_cast<std::size_t>(width))
    text.resize(static_cast<std::size_t>(width));
  return text;
}

void Progress::draw() {
  drawn_ = Clock::now();
  if (options_.style == ProgressStyle::bar) {
    const std::string text = line(terminal_width(options_.stream) - 1);
    fmt::print(options_.stream, "\r{}\x1b[K", text);  // and clear what a longer line may have left
  } else {
    while (total_ > 0 && next_line_ <= steps_) {
      // The tenths of the way, and the end itself.
      const std::size_t part = next_line_ * kParts / total_ + 1;
      next_line_ = std::max(next_line_ + 1, part >= kParts ? total_ : (part * total_ + kParts - 1) / kParts);
    }
    fmt::print(options_.stream, "{}\n", line(kLogWidth));
  }
  std::fflush(options_.stream);
}

}  // namespace maniple
