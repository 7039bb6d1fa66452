// Reads the kernel's process table (/proc), and finds and ends the descendants of this process.
//
// The launcher is a "subreaper": orphaned descendants become its own children, so a process cannot escape by starting a
// session of its own.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace maniple::launch {

/// Fields of /proc/PID/stat; 0 if the line ends before the field.
struct ProcessStat {
  std::string name;
  char state = '?';
  pid_t parent = 0;
  pid_t group = 0;
  int terminal = 0;                           ///< 0: none
  pid_t foreground_group = 0;                 ///< of its terminal
  std::uint64_t start = 0;                    ///< clock ticks since boot; pid and start together are unique
  std::uintptr_t arg_begin = 0, arg_end = 0;  ///< the address range of its command line
};
std::optional<ProcessStat> parse_process_stat(std::string_view line);
std::optional<ProcessStat> process_stat(pid_t pid);

/// The start time of a process; nullopt if it does not exist or is a zombie.
std::optional<std::uint64_t> start_of_process(pid_t pid);

/// "pid:[4026531836]", the namespace in which this process's pids are valid.
std::string own_pid_namespace();

/// Folders of a process's control groups, where the kernel exposes limits and counters. Empty: not in such a group.
struct ControlGroups {
  std::string unified;  ///< version 2
  std::string memory;   ///< version 1
  std::string cpu;
};
/// Parses /proc/PID/cgroup: lines "0::/path" and "4:cpu,cpuacct:/path".
ControlGroups parse_control_groups(std::string_view text);
ControlGroups control_groups(pid_t pid);

/// From now on orphaned descendants become children of this process, not of init.
void adopt_orphans() noexcept;

/// Children of this process, their children, and so on.
std::vector<pid_t> descendants();
std::vector<pid_t> descendants_of(pid_t root);  ///< the same for any process

/// Sends a terminating signal (SIGTERM, SIGINT, ...) to a process or, with a negative `pid`, to a process group. Also
/// continues stopped processes, which could not act on the signal otherwise.
void ask_to_end(pid_t pid, int signal) noexcept;

/// Signals all descendants, repeatedly until no new ones appear. Continues stopped descendants.
void signal_descendants(int signal);

/// Kills all descendants and waits at most `limit` for them. Returns the rest: processes that the kernel cannot end
/// (state D).
std::vector<pid_t> end_descendants(std::chrono::milliseconds limit);

/// Ends a child with SIGTERM, and with SIGKILL after `grace`. Waits for the child and returns its wait status.
int end_child(pid_t pid, std::chrono::milliseconds grace);

/// "pid 4711 (tar, state D)".
std::string describe_process(pid_t pid);

}  // namespace maniple::launch
