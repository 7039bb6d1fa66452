// The kernel's process table (/proc): what it says about a process, and all processes that descend from this one.
//
// The launcher is a "subreaper": what its workers leave behind becomes its own child, so nothing gets away by starting
// a session of its own.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace maniple::launch {

/// Fields of /proc/PID/stat; 0 where the line ends before them.
struct ProcessStat {
  std::string name;
  char state = '?';
  pid_t parent = 0;
  pid_t group = 0;
  int terminal = 0;            ///< 0: none
  pid_t foreground_group = 0;  ///< of its terminal
  std::uint64_t start = 0;     ///< clock ticks after boot: with its number, that names a process for good
  std::uintptr_t arg_begin = 0, arg_end = 0;  ///< where its command line lies in its memory
};
std::optional<ProcessStat> parse_process_stat(std::string_view line);
std::optional<ProcessStat> process_stat(pid_t pid);

/// Its start; nullopt when there is no such process, or only what is left of one (a zombie).
std::optional<std::uint64_t> start_of_process(pid_t pid);

/// "pid:[4026531836]": numbers of processes mean something only inside one of these.
std::string own_pid_namespace();

/// Folders of the control groups of a process, in which the kernel shows its limits and counters; empty: in none.
struct ControlGroups {
  std::string unified;  ///< version 2
  std::string memory;   ///< version 1
  std::string cpu;
};
/// From the text of /proc/PID/cgroup: lines "0::/path" and "4:cpu,cpuacct:/path".
ControlGroups parse_control_groups(std::string_view text);
ControlGroups control_groups(pid_t pid);

/// From now on orphans among the descendants become children of this process, not of init.
void adopt_orphans() noexcept;

/// Children of this process, their children, and so on.
std::vector<pid_t> descendants();
std::vector<pid_t> descendants_of(pid_t root);  ///< the same of any process

/// Sends a signal that asks to end (SIGTERM, SIGINT, ...) to a process, or with a negative number to a process group;
/// one that is stopped is continued, as it could not act on the signal.
void ask_to_end(pid_t pid, int signal) noexcept;

/// Sends the signal to all of them, several times over until no new ones appear. Stopped ones are continued.
void signal_descendants(int signal);

/// Kills all descendants and waits for them, at most `limit`. What is left is returned: processes that the kernel
/// cannot end (state D).
std::vector<pid_t> end_descendants(std::chrono::milliseconds limit);

/// Ends a child: SIGTERM, after the grace time SIGKILL. Waits for it; the result is its wait status.
int end_child(pid_t pid, std::chrono::milliseconds grace);

/// "pid 4711 (tar, state D)".
std::string describe_process(pid_t pid);

}  // namespace maniple::launch
