#include <maniple/train/progress.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "comm/base/check.h"
#include "comm/base/format.h"
#include "train/progress_line.h"
#include "train/tensor/device.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

constexpr std::size_t kWidestBar = 30;
constexpr std::size_t kNarrowestBar = 5;
constexpr std::size_t kFrame = 3;      // the bar's brackets and a space
constexpr std::size_t kShortBar = 10;  // the bar shrinks to this width before a note is cut for it
constexpr std::size_t kLeastNote = 8;  // a note keeps at least this width when it is cut for a bar

std::string bar_of(const ProgressState& state, std::size_t columns) {
  const std::size_t filled = columns * std::min(state.steps, state.total) / state.total;
  return "[" + std::string(filled, '#') + std::string(columns - filled, '.') + "] ";
}

std::string time_text(const ProgressState& state) {
  const std::size_t own = state.steps - state.start;
  if (state.over || state.total == 0 || own == 0 || state.steps >= state.total) return duration_text(state.elapsed);
  return duration_text(state.elapsed / static_cast<double>(own) * static_cast<double>(state.total - state.steps)) +
         " left";
}

}  // namespace

std::string duration_text(double seconds) {
  const auto whole = static_cast<long long>(std::min(seconds, 1e15) + 0.5);
  if (whole < 100) return format_text("{} s", whole);
  if (whole < 3600) return format_text("{}:{:02} min", whole / 60, whole % 60);
  if (whole < 24 * 3600) return format_text("{}:{:02} h", whole / 3600, whole / 60 % 60);
  return format_text("{} d {}:{:02} h", whole / (24 * 3600), whole / 3600 % 24, whole / 60 % 60);
}

std::string progress_line(const ProgressState& state) {
  const bool known = state.total > 0;
  std::string label = one_line(state.label);
  if (state.must_fit) label = cut_to_columns(label, std::max<std::size_t>(8, state.width / 3));
  if (!label.empty()) label += " ";
  const std::string percent = known ? format_text("{:3} %", 100 * state.steps / state.total) : "";
  std::string count = known ? format_text(" {}/{}", state.steps, state.total) : format_text("{}", state.steps);
  std::string rate;
  if (!state.unit.empty() && state.elapsed > 0)
    rate = format_text("  {:.{}f} {}/s", static_cast<double>(state.amount) / state.elapsed,
                       static_cast<double>(state.amount) < 10 * state.elapsed ? 1 : 0, one_line(state.unit));
  const std::string time = "  " + time_text(state);
  std::string memory = state.memory.empty() ? "" : "  " + state.memory;
  std::string note = state.note.empty() ? "" : "  " + one_line(state.note);

  const auto fixed = [&] { return columns_of(label + percent + count + rate + time + memory); };
  if (state.must_fit && fixed() > state.width) memory.clear();
  if (state.must_fit && fixed() > state.width) rate.clear();
  if (state.must_fit && fixed() > state.width && known) count.clear();
  const std::size_t room = state.width - std::min(state.width, fixed());

  std::string bar;
  const std::size_t for_note = columns_of(note);
  if (known && room >= for_note + kFrame + kNarrowestBar) {
    bar = bar_of(state, std::min(kWidestBar, room - for_note - kFrame));
  } else if (known && state.must_fit && room >= kFrame + kShortBar + std::min(for_note, kLeastNote)) {
    bar = bar_of(state, kShortBar);
  }
  if (state.must_fit) note = cut_to_columns(note, room - std::min(room, bar.size()));
  if (note == "~" || note == " ~" || note == "  ~") note.clear();
  const std::string line = label + bar + percent + count + rate + time + memory + note;
  return state.must_fit ? cut_to_columns(line, state.width) : line;
}

std::string memory_text(std::size_t allocated, std::size_t reserved) {
  if (reserved == 0) return {};
  const auto gib = [](std::size_t bytes) { return static_cast<double>(bytes) / (std::size_t{1} << 30); };
  return format_text("GPU {:.1f} of {:.1f} GiB", gib(allocated), gib(reserved));
}

namespace {

constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr auto kLongestSilence = std::chrono::seconds(30);
constexpr std::size_t kParts = 10;  // lines in a log, unless steps are slow
constexpr std::size_t kLogWidth = 110;

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

/// In a log: the next step after which a line is due; every tenth of the total, and the end.
std::size_t next_line_after(std::size_t steps, std::size_t total) {
  if (total == 0 || steps >= total) return steps + 1;
  const std::size_t part = steps * kParts / total + 1;
  return std::max(steps + 1, part >= kParts ? total : (part * total + kParts - 1) / kParts);
}

}  // namespace

Progress::Progress(std::size_t total, ProgressOptions options)
    : total_(total), options_(std::move(options)), start_(Clock::now()), drawn_(start_), steps_(options_.start) {
  MANIPLE_REQUIRE(options_.stream != nullptr, "Progress: the stream is null");
  MANIPLE_REQUIRE(total == 0 || options_.start <= total, "Progress: starts at step {} of {}", options_.start, total);
  options_.style = style_for(options_);
  if (options_.only_rank_0 && is_initialized()) ranks_ = get_world_size();
  next_line_ = next_line_after(steps_, total_);
}

Progress::~Progress() { finish(); }

double Progress::elapsed() const {
  return std::chrono::duration<double>((finished_ ? end_ : Clock::now()) - start_).count();
}

double Progress::units_per_second() const {
  const double seconds = elapsed();
  return seconds > 0 ? static_cast<double>(amount_) / seconds : 0;
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
  amount_ += amount * ranks_;
  if (!note.empty()) note_ = note;
  if (due) draw();
}

void Progress::finish() {
  if (finished_) return;
  end_ = Clock::now();
  if (options_.style == ProgressStyle::silent) {
    finished_ = true;
    return;
  }
  if (options_.style == ProgressStyle::bar) {
    draw();
    std::fputc('\n', options_.stream);
    std::fflush(options_.stream);
  } else if (total_ == 0 || steps_ < total_) {
    draw();  // the line of the last step has not been printed yet
  }
  finished_ = true;
}

void Progress::draw() {
  drawn_ = Clock::now();
  const PeakMemory memory = peak_memory();
  ProgressState state = {.label = options_.label,
                         .unit = options_.unit,
                         .note = note_,
                         .memory = memory_text(memory.allocated, memory.reserved),
                         .total = total_,
                         .start = options_.start,
                         .steps = steps_,
                         .amount = amount_,
                         .elapsed = elapsed(),
                         .over = end_ != Clock::time_point()};
  if (options_.style == ProgressStyle::bar) {
    // The last column stays free: some terminals wrap when it is written.
    const std::size_t width = terminal_width(options_.stream);
    state.width = width - 1;
    // A terminal that has become narrower has wrapped the previous line into several; go back to where it began.
    const std::size_t rows_above = drawn_columns_ > 0 ? (drawn_columns_ - 1) / width : 0;
    const std::string back = rows_above > 0 ? format_text("\x1b[{}A", rows_above) : "";
    const std::string text = progress_line(state);
    std::fputs((back + "\r" + text + (rows_above > 0 ? "\x1b[J" : "\x1b[K")).c_str(),
               options_.stream);  // also clears the rest of a longer line
    drawn_columns_ = columns_of(text);
  } else {
    if (total_ > 0 && next_line_ <= steps_) next_line_ = next_line_after(steps_, total_);
    state.must_fit = false;
    state.width = kLogWidth;
    std::fputs((progress_line(state) + "\n").c_str(), options_.stream);
  }
  std::fflush(options_.stream);
}

}  // namespace maniple
