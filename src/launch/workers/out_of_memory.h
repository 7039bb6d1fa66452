// Was it the kernel's out-of-memory killer? It sends SIGKILL like anybody else; what tells them apart are counters.
//
// A control group counts the kills among its processes: "oom_kill" in memory.events (version 2) or memory.oom_control
// (version 1). The whole machine counts in /proc/vmstat, kills of control groups as well. The kernel's log, where it
// may be read, has the process and whose memory was short.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace maniple::launch {

struct OomCounters {
  std::string group = {};               ///< path of the control group's folder; empty: unknown
  std::optional<long long> kills = {};  ///< in the group
  std::optional<long long> limit = {};  ///< bytes; none: no limit
  std::optional<long long> peak = {};   ///< bytes
  std::optional<long long> machine_kills = {};
  bool machine_short = false;  ///< the kernel's log says that it was the machine's memory
};

/// What the kernel's log says of a kill. Pure.
struct OomRecord {
  bool machine_short = false;
  std::string group = {};  ///< the control group whose limit was reached: its path in the hierarchy
};
/// From a line like "oom-kill:constraint=CONSTRAINT_MEMCG,...,oom_memcg=/a,task_memcg=/a/b,task=x,pid=7,uid=0"; nullopt
/// if it is of another process, or none of these.
std::optional<OomRecord> parse_oom_record(std::string_view line, int pid);

/// Completes counters by what the log of the kernel says about the process; unchanged where the log may not be read.
void add_kernel_log(OomCounters& counters, int pid);

/// What is known about a process now; also of one that has ended but was not waited for yet. Where the kernel does not
/// say any more which group it was in (version 1 counts the dead to the root), it was `group`.
OomCounters read_oom_counters(int pid, const std::string& group = {});

/// The words after "signal SIGKILL (killed)": empty if nothing speaks for the out-of-memory killer. `before` is of the
/// time the worker was started. Pure.
std::string judge_kill(int signal, bool sent_by_launcher, const OomCounters& before, const OomCounters& after);

/// The number after `name` at the beginning of a line. Pure.
std::optional<long long> counter_in(std::string_view text, std::string_view name);

}  // namespace maniple::launch
