#include "train/progress_line.h"

#include <algorithm>

#include "base/format.h"
#include "base/utf8.h"

namespace maniple {
namespace {

constexpr std::size_t kWidestBar = 30;
constexpr std::size_t kNarrowestBar = 5;
constexpr std::size_t kFrame = 3;      // its brackets, and a space
constexpr std::size_t kShortBar = 10;  // what it shrinks to, before a note is cut for it
constexpr std::size_t kLeastNote = 8;  // what is left of a note at least, when it is cut for a bar

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
  std::string note = state.note.empty() ? "" : "  " + one_line(state.note);

  const auto fixed = [&] { return columns_of(label + percent + count + rate + time); };
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
  const std::string line = label + bar + percent + count + rate + time + note;
  return state.must_fit ? cut_to_columns(line, state.width) : line;
}

}  // namespace maniple
