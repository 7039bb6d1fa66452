#include "launch/process/process_table.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "comm/base/unique_fd.h"

namespace maniple::launch {
namespace {

std::map<pid_t, std::vector<pid_t>> children_of_all() {
  std::map<pid_t, std::vector<pid_t>> children;
  DIR* folder = ::opendir("/proc");
  if (folder == nullptr) return children;
  while (const dirent* entry = ::readdir(folder)) {
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    const pid_t pid = std::atoi(entry->d_name);
    const auto stat = process_stat(pid);
    if (stat && stat->state != 'Z') children[stat->parent].push_back(pid);
  }
  ::closedir(folder);
  return children;
}

/// Whether this process has no children, not even dead ones. Far cheaper than scanning /proc.
bool childless() {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD;
}

}  // namespace

std::optional<ProcessStat> parse_process_stat(std::string_view line) {
  // The name is in parentheses and may itself contain parentheses and blanks.
  const auto open = line.find('(');
  const auto close = line.rfind(')');
  if (open == std::string_view::npos || close == std::string_view::npos || close < open || close + 2 >= line.size()) {
    return std::nullopt;
  }
  ProcessStat stat{.name = std::string(line.substr(open + 1, close - open - 1)), .state = line[close + 2]};
  constexpr int kFirst = 4, kLast = 49;  // field numbers of proc(5); the state is field 3
  std::array<long long, kLast + 1> fields{};
  line.remove_prefix(close + 3);
  for (int field = kFirst; field <= kLast && !line.empty(); ++field) {
    line.remove_prefix(std::min(line.find_first_not_of(" \n"), line.size()));
    const auto end = std::min(line.find_first_of(" \n"), line.size());
    std::from_chars(line.data(), line.data() + end, fields[static_cast<std::size_t>(field)]);
    line.remove_prefix(end);
  }
  stat.parent = static_cast<pid_t>(fields[4]);
  stat.group = static_cast<pid_t>(fields[5]);
  stat.terminal = static_cast<int>(fields[7]);
  stat.foreground_group = static_cast<pid_t>(fields[8]);
  stat.start = static_cast<std::uint64_t>(fields[22]);
  stat.arg_begin = static_cast<std::uintptr_t>(fields[48]);
  stat.arg_end = static_cast<std::uintptr_t>(fields[49]);
  return stat;
}

std::optional<ProcessStat> process_stat(pid_t pid) {
  const UniqueFd file(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 2048> text;
  const ssize_t got = file ? ::read(file.get(), text.data(), text.size()) : -1;
  if (got <= 0) return std::nullopt;
  return parse_process_stat({text.data(), static_cast<std::size_t>(got)});
}

std::optional<std::uint64_t> start_of_process(pid_t pid) {
  const auto stat = process_stat(pid);
  if (!stat || stat->state == 'Z' || stat->state == 'X') return std::nullopt;
  return stat->start;
}

std::string own_pid_namespace() {
  std::array<char, 64> text;
  const ssize_t got = ::readlink("/proc/self/ns/pid", text.data(), text.size());
  return got > 0 ? std::string(text.data(), static_cast<std::size_t>(got)) : std::string();
}

ControlGroups parse_control_groups(std::string_view text) {
  const std::string root = "/sys/fs/cgroup";
  ControlGroups groups;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const auto first = line.find(':');
    const auto second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const std::string path(line.substr(second + 1) == "/" ? "" : line.substr(second + 1));
    if (controllers == ",,") groups.unified = root + path;
    if (controllers.find(",memory,") != std::string::npos) groups.memory = root + "/memory" + path;
    if (controllers.find(",cpu,") != std::string::npos) groups.cpu = root + "/cpu" + path;
  }
  return groups;
}

ControlGroups control_groups(pid_t pid) { return parse_control_groups(file_text(fmt::format("/proc/{}/cgroup", pid))); }

void adopt_orphans() noexcept { ::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); }

std::vector<pid_t> descendants() { return childless() ? std::vector<pid_t>() : descendants_of(::getpid()); }

std::vector<pid_t> descendants_of(pid_t root) {
  std::vector<pid_t> found;
  const auto children = children_of_all();
  std::vector<pid_t> pending = {root};
  while (!pending.empty()) {
    const auto own = children.find(pending.back());
    pending.pop_back();
    if (own == children.end()) continue;
    found.insert(found.end(), own->second.begin(), own->second.end());
    pending.insert(pending.end(), own->second.begin(), own->second.end());
  }
  return found;
}

void ask_to_end(pid_t pid, int signal) noexcept {
  if (::kill(pid, signal) == 0) ::kill(pid, SIGCONT);
}

void signal_descendants(int signal) {
  constexpr int kRounds = 8;  // a process that keeps forking may stay ahead for a while
  std::set<pid_t> signalled;
  for (int round = 0; round < kRounds; ++round) {
    bool more = false;
    for (const pid_t pid : descendants()) {
      if (!signalled.insert(pid).second) continue;
      ask_to_end(pid, signal);
      more = true;
    }
    if (!more) return;
  }
}

std::vector<pid_t> end_descendants(std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  std::chrono::microseconds pause{200};
  for (;;) {
    for (const pid_t pid : descendants()) ::kill(pid, SIGKILL);
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    if (childless()) return {};
    if (std::chrono::steady_clock::now() >= end) return descendants();
    // sleep: between two polls for children, which are not announced to a subreaper
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(20'000));
  }
}

int end_child(pid_t pid, std::chrono::milliseconds grace) {
  ask_to_end(pid, SIGTERM);
  const auto end = std::chrono::steady_clock::now() + grace;
  int status = 0;
  for (;;) {
    const pid_t ended = ::waitpid(pid, &status, WNOHANG);
    if (ended == pid || (ended < 0 && errno != EINTR)) return status;
    if (std::chrono::steady_clock::now() >= end) ::kill(pid, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // sleep: between two polls of the child
  }
}

std::string describe_process(pid_t pid) {
  const auto stat = process_stat(pid);
  if (!stat) return fmt::format("pid {}", pid);
  return fmt::format("pid {} ({}, state {})", pid, stat->name, stat->state);
}

}  // namespace maniple::launch
