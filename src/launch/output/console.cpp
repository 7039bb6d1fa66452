#include "launch/output/console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

#include <fmt/format.h>

#include "launch/workers/supervisor.h"

namespace maniple::launch {
namespace {

constexpr std::chrono::duration<double> kRedraw{0.25};
constexpr std::string_view kErase = "\r\x1b[K";
// Neighbouring ranks get colours that are easy to tell apart; red is reserved for errors.
constexpr int kColours[] = {36, 32, 33, 35, 34, 96, 92, 93, 95, 94};

std::size_t terminal_width() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace

Console::Console(Poller& poller, const ConsoleOptions& options)
    : poller_(poller), options_(options), out_(poller, STDOUT_FILENO), err_(poller, STDERR_FILENO) {}

Console::~Console() { poller_.cancel(timer_); }

bool Console::colours(const OutputStream& stream) const {
  if (options_.colour != ColourChoice::automatic) return options_.colour == ColourChoice::always;
  const char* no_colour = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  const bool dumb = terminal != nullptr && std::string_view(terminal) == "dumb";
  return stream.terminal() && !dumb && (no_colour == nullptr || *no_colour == '\0');
}

std::string Console::prefix_for(int rank, bool to_err) const {
  if (!options_.prefix) return {};
  if (!colours(to_err ? err_ : out_)) return fmt::format("[rank {}] ", rank);
  const int colour = kColours[static_cast<std::size_t>(rank) % std::size(kColours)];
  return fmt::format("\x1b[{}m[rank {}]\x1b[0m ", colour, rank);
}

void Console::make_room() {
  if (!drawn_) return;
  drawn_ = false;
  err_.append(kErase);
  err_.flush();
}

void Console::say(std::string_view text) {
  make_room();
  err_.append(text);
  err_.append('\n');
  err_.flush();
}

void Console::set_status(std::function<std::string()> text) {
  if (options_.quiet || !options_.status || !err_.terminal()) return;
  status_ = std::move(text);
  if (timer_ == 0) timer_ = poller_.call_after(kRedraw, [this] { draw(); });
}

void Console::draw() {
  timer_ = poller_.call_after(kRedraw, [this] { draw(); });
  if (paused_ || !err_.empty() || !out_.empty() || !in_foreground()) return;
  std::string line = status_();
  const std::size_t width = terminal_width();
  if (line.size() + 1 > width) line.resize(width > 1 ? width - 1 : 0);
  err_.append(kErase);
  err_.append(line);
  err_.flush();
  drawn_ = true;
}

void Console::pause(bool paused) {
  paused_ = paused;
  make_room();
}

void Console::finish() {
  poller_.cancel(timer_);
  make_room();
  out_.flush();
  err_.flush();
}

}  // namespace maniple::launch
