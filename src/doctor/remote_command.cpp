#include "doctor/remote_command.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>

#include <fmt/format.h>

#include "base/system_error.h"

extern char** environ;

namespace maniple::doctor {
namespace {

constexpr std::size_t kMostBytes = 64 * 1024;
constexpr int kGraceMs = 2000;

std::pair<UniqueFd, UniqueFd> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_system_error("pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

}  // namespace

RemoteCommand::RemoteCommand(std::vector<std::string> words) {
  auto [out, out_theirs] = make_pipe();
  auto [err, err_theirs] = make_pipe();
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, out_theirs.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, err_theirs.get(), STDERR_FILENO);
  const int code = ::posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (code != 0) throw_system_error("starting " + words[0], code);
  out_ = std::move(out);
  err_ = std::move(err);
  ::fcntl(err_.get(), F_SETFL, O_NONBLOCK);
}

RemoteCommand::~RemoteCommand() {
  out_.reset();
  ::kill(pid_, SIGTERM);
  const Deadline context = Deadline::after(std::chrono::milliseconds(kGraceMs));
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (context.expired()) ::kill(pid_, SIGKILL);
    ::poll(nullptr, 0, 2);
  }
}

std::optional<std::string> RemoteCommand::next_line(Deadline deadline) {
  for (;;) {
    const auto end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    if (buffer_.size() > kMostBytes) return std::nullopt;
    pollfd state{out_.get(), POLLIN, 0};
    const int ready = ::poll(&state, 1, deadline.poll_ms());
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0 && deadline.expired()) return std::nullopt;
    if (ready <= 0) continue;
    char bytes[1024];
    const ssize_t got = ::read(out_.get(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      ended_ = true;
      return std::nullopt;
    }
    buffer_.append(bytes, static_cast<std::size_t>(got));
  }
}

std::string RemoteCommand::complaint() {
  std::string text;
  char bytes[1024];
  // To its end, if that is near: it may come a little after the end of the output.
  const Deadline context = Deadline::after(std::chrono::milliseconds(ended_ ? kGraceMs : 0));
  while (text.size() < kMostBytes) {
    const ssize_t got = ::read(err_.get(), bytes, sizeof bytes);
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) break;
    if (got > 0) {
      text.append(bytes, static_cast<std::size_t>(got));
      continue;
    }
    pollfd state{err_.get(), POLLIN, 0};
    if (context.expired()) break;
    ::poll(&state, 1, context.poll_ms());
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  const auto last = text.rfind('\n');
  if (last != std::string::npos) text.erase(0, last + 1);
  return text;
}

}  // namespace maniple::doctor
