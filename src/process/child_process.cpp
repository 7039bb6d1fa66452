#include "process/child_process.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "process/process_table.h"

namespace maniple::launch {
namespace {

constexpr std::size_t kMostBytes = 64 * 1024;
constexpr std::chrono::seconds kErrorTimeout{2};

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& command) {
  const char* path = std::getenv("PATH");
  const Program program = find_program(command, path != nullptr ? path : "/usr/bin:/bin");
  const Environment environment = own_environment();
  process_ = start_process({.program = &program, .environment = &environment});
}

ChildProcess::ChildProcess(const StartOptions& options, std::chrono::milliseconds grace)
    : process_(start_process(options)), grace_(grace) {}

ChildProcess::~ChildProcess() {
  process_.out.reset();
  end_child(process_.pid, grace_);
}

std::optional<std::string> ChildProcess::next_line(Deadline deadline) {
  for (;;) {
    const auto end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    if (buffer_.size() > kMostBytes) return std::nullopt;
    pollfd state{process_.out.get(), POLLIN, 0};
    const int ready = ::poll(&state, 1, deadline.poll_ms());
    if (ready <= 0 && deadline.expired()) return std::nullopt;
    if (ready <= 0) continue;
    char bytes[1024];
    const ssize_t got = ::read(process_.out.get(), bytes, sizeof bytes);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) {
      ended_ = true;
      return std::nullopt;
    }
    buffer_.append(bytes, static_cast<std::size_t>(got));
  }
}

std::string ChildProcess::last_error_line() {
  std::string text;
  char bytes[1024];
  // To its end, if that is near: it may come a little after the end of the output.
  const Deadline deadline = Deadline::after(ended_ ? kErrorTimeout : std::chrono::seconds(0));
  while (text.size() < kMostBytes) {
    const ssize_t got = ::read(process_.err.get(), bytes, sizeof bytes);
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) break;
    if (got > 0) {
      text.append(bytes, static_cast<std::size_t>(got));
      continue;
    }
    pollfd state{process_.err.get(), POLLIN, 0};
    if (deadline.expired()) break;
    ::poll(&state, 1, deadline.poll_ms());
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  const auto last = text.rfind('\n');
  if (last != std::string::npos) text.erase(0, last + 1);
  return text;
}

}  // namespace maniple::launch
