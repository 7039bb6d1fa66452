#include "launch/launched.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <thread>

#include <fmt/format.h>

#include "harness/temporary_directory.h"

extern char** environ;

namespace maniple::launched {
namespace {

using Clock = std::chrono::steady_clock;

UniqueFd open_terminal(UniqueFd& other_side) {
  UniqueFd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!master || ::grantpt(master.get()) != 0 || ::unlockpt(master.get()) != 0) throw std::runtime_error("no terminal");
  char name[128];
  ::ptsname_r(master.get(), name, sizeof name);
  other_side.reset(::open(name, O_RDWR | O_NOCTTY | O_CLOEXEC));
  return master;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> list;
  for (std::string& text : strings) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

/// Its first child that is a process of the launcher; the reaper may have a daemon of the job, too.
pid_t first_child_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/task/{}/children", pid, pid));
  for (pid_t child = 0; file >> child;) {
    std::string name;
    std::getline(std::ifstream(fmt::format("/proc/{}/comm", child)), name);
    if (name == "maniple" || name == "rank-reaper") return child;
  }
  throw std::runtime_error(fmt::format("process {} of the launcher has no child", pid));
}

}  // namespace

std::string maniple_program() { return MANIPLE_PROGRAM; }
std::string worker_program() { return LAUNCH_WORKER; }

Launched::Launched(const std::vector<std::string>& arguments, const Setting& setting) {
  UniqueFd child_out, child_err, child_in;
  if (setting.terminal) {
    out_fd_ = open_terminal(child_out);
    child_err.reset(::fcntl(child_out.get(), F_DUPFD_CLOEXEC, 3));
  } else {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    out_fd_.reset(ends[0]);
    child_out.reset(ends[1]);
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    err_fd_.reset(ends[0]);
    child_err.reset(ends[1]);
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  child_in.reset(ends[0]);
  const UniqueFd input(ends[1]);
  if (::write(input.get(), setting.input.data(), setting.input.size()) < 0) throw std::runtime_error("write");

  std::vector<std::string> argv = {setting.program.empty() ? maniple_program() : setting.program};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  std::vector<std::string> env;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    const bool replaced =
        std::any_of(setting.env.begin(), setting.env.end(), [&](const auto& p) { return p.first == name; });
    if (!replaced) env.emplace_back(*entry);
  }
  for (const auto& [name, value] : setting.env) env.push_back(name + "=" + value);
  // A job sees the records of this test's jobs and of no others.
  static const harness::TemporaryDirectory records;
  const bool own_records =
      std::any_of(setting.env.begin(), setting.env.end(), [](const auto& p) { return p.first == "XDG_RUNTIME_DIR"; });
  if (!own_records) env.insert(env.begin(), "XDG_RUNTIME_DIR=" + records.path());

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, child_in.get(), 0);
  posix_spawn_file_actions_adddup2(&actions, child_out.get(), 1);
  posix_spawn_file_actions_adddup2(&actions, child_err.get(), 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t all;
  ::sigfillset(&all);
  posix_spawnattr_setsigdefault(&attributes, &all);  // a test in the background of a shell ignores SIGINT
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
  const int error =
      ::posix_spawn(&pid_, argv.front().c_str(), &actions, &attributes, pointers(argv).data(), pointers(env).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) throw std::runtime_error(fmt::format("starting {}: {}", argv.front(), std::strerror(error)));
}

Launched::~Launched() {
  if (code_ >= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

/// False once both outputs have ended, or nothing came in time.
bool Launched::read_some(double seconds) {
  pollfd fds[2] = {{.fd = out_fd_.get(), .events = POLLIN, .revents = 0},
                   {.fd = err_fd_.get(), .events = POLLIN, .revents = 0}};
  if (!out_fd_ && !err_fd_) return false;
  if (::poll(fds, 2, static_cast<int>(seconds * 1000)) <= 0) return false;
  for (int i = 0; i < 2; ++i) {
    if (fds[i].revents == 0) continue;
    std::string buffer(std::size_t{1} << 16, '\0');
    const ssize_t got = ::read(fds[i].fd, buffer.data(), buffer.size());
    if (got > 0) (i == 0 ? out_ : err_).append(buffer.data(), static_cast<std::size_t>(got));
    if (got <= 0) (i == 0 ? out_fd_ : err_fd_).reset();
  }
  return true;
}

int Launched::count(const std::string& text) const {
  int found = 0;
  for (const std::string* all : {&out_, &err_}) {
    for (auto at = all->find(text); at != std::string::npos; at = all->find(text, at + 1)) ++found;
  }
  return found;
}

bool Launched::wait_for(const std::string& text, double seconds, int times) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (count(text) < times) {
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (left <= 0 || !read_some(left)) return count(text) >= times;
  }
  return true;
}

void Launched::signal(int number) const { ::kill(pid_, number); }

int Launched::wait(double seconds) {
  if (code_ >= 0) return code_;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (left <= 0) return -1;
    if (!read_some(std::min(left, 0.5)) && !out_fd_ && !err_fd_) break;
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      while (read_some(0.2)) {
      }
      return code_;
    }
  }
  int status = 0;
  if (::waitpid(pid_, &status, 0) != pid_) return -1;
  code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return code_;
}

Result maniple(const std::vector<std::string>& arguments, const Setting& setting) {
  Launched launched(arguments, setting);
  Result result;
  result.code = launched.wait();
  result.out = launched.out();
  result.err = launched.err();
  return result;
}

std::vector<pid_t> processes_with(const std::string& mark) {
  std::vector<pid_t> found;
  DIR* folder = ::opendir("/proc");
  while (const dirent* entry = ::readdir(folder)) {
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    std::ifstream file(fmt::format("/proc/{}/environ", entry->d_name), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (text.find(mark) != std::string::npos) found.push_back(std::atoi(entry->d_name));
  }
  ::closedir(folder);
  return found;
}

pid_t Launched::reaper() const { return first_child_of(pid_); }
pid_t Launched::agent() const { return first_child_of(reaper()); }

char state_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto name_end = text.rfind(") ");  // the name may hold anything
  return name_end == std::string::npos ? '\0' : text[name_end + 2];
}

std::string new_mark() {
  std::random_device random;
  return fmt::format("TEST_MARK={:08x}{:08x}", random(), random());
}

bool becomes_true(const std::function<bool()>& condition, double seconds) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // sleep: between two polls
  }
  return true;
}

}  // namespace maniple::launched
