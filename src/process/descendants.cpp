#include "process/descendants.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include <fmt/format.h>

#include "base/unique_fd.h"

namespace maniple::launch {
namespace {

struct Stat {
  std::string name;
  char state = '?';
  pid_t parent = 0;
};

bool read_stat(pid_t pid, Stat& stat) {
  const UniqueFd file(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  char text[512];
  const ssize_t got = file ? ::read(file.get(), text, sizeof text - 1) : -1;
  if (got <= 0) return false;
  text[got] = '\0';
  // The name is in parentheses and may itself hold some.
  const char* open = std::strchr(text, '(');
  const char* close = std::strrchr(text, ')');
  if (open == nullptr || close == nullptr || close < open || close[1] == '\0') return false;
  stat.name.assign(open + 1, close);
  stat.state = close[2];
  stat.parent = std::atoi(close + 3);
  return true;
}

std::map<pid_t, std::vector<pid_t>> children_of_all() {
  std::map<pid_t, std::vector<pid_t>> children;
  DIR* folder = ::opendir("/proc");
  if (folder == nullptr) return children;
  while (const dirent* entry = ::readdir(folder)) {
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    const pid_t pid = std::atoi(entry->d_name);
    Stat stat;
    if (read_stat(pid, stat) && stat.state != 'Z') children[stat.parent].push_back(pid);
  }
  ::closedir(folder);
  return children;
}

/// Has this process any child at all, dead ones included? Far cheaper than a look through /proc.
bool childless() {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD;
}

}  // namespace

void adopt_orphans() noexcept { ::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); }

std::vector<pid_t> descendants(pid_t except) {
  std::vector<pid_t> found;
  if (childless()) return found;
  const auto children = children_of_all();
  std::vector<pid_t> pending = {::getpid()};
  while (!pending.empty()) {
    const auto own = children.find(pending.back());
    pending.pop_back();
    if (own == children.end()) continue;
    for (const pid_t child : own->second) {
      if (child == except) continue;
      found.push_back(child);
      pending.push_back(child);
    }
  }
  return found;
}

void signal_descendants(int signal, pid_t except) {
  constexpr int kRounds = 8;  // a process that keeps forking may be ahead of us for a while
  std::set<pid_t> told;
  for (int round = 0; round < kRounds; ++round) {
    bool more = false;
    for (const pid_t pid : descendants(except)) {
      if (!told.insert(pid).second) continue;
      ::kill(pid, signal);
      more = true;
    }
    if (!more) return;
  }
}

std::vector<pid_t> end_descendants(int limit_ms) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
  std::chrono::microseconds pause{200};
  for (;;) {
    for (const pid_t pid : descendants()) ::kill(pid, SIGKILL);
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    if (childless()) return {};
    if (std::chrono::steady_clock::now() >= limit) return descendants();
    // sleep: between two looks for children, which nothing announces to a subreaper
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(20'000));
  }
}

std::string describe_process(pid_t pid) {
  Stat stat;
  if (!read_stat(pid, stat)) return fmt::format("pid {}", pid);
  return fmt::format("pid {} ({}, state {})", pid, stat.name, stat.state);
}

}  // namespace maniple::launch
