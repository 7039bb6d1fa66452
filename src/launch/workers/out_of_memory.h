// Detects kills by the kernel's out-of-memory killer. It sends a plain SIGKILL, so kernel counters are compared before
// and after.
//
// A control group counts the kills among its processes: "oom_kill" in memory.events (version 2) or memory.oom_control
// (version 1). /proc/vmstat counts kills on the whole machine, including kills in control groups. The kernel's log, if
// readable, names the process and whether the machine's or a control group's memory was short.
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
  bool machine_short = false;  ///< the machine's memory was short, according to the kernel's log
};

/// The kernel's log entry for a kill.
struct OomRecord {
  bool machine_short = false;
  std::string group = {};  ///< the control group whose limit was reached: its path in the hierarchy
};
/// Parses a line like "oom-kill:constraint=CONSTRAINT_MEMCG,...,oom_memcg=/a,task_memcg=/a/b,task=x,pid=7,uid=0".
/// nullopt if the line is about another process or has another form. Pure.
std::optional<OomRecord> parse_oom_record(std::string_view line, int pid);

/// Adds the kernel log's information about the process; changes nothing if the log is not readable.
void add_kernel_log(OomCounters& counters, int pid);

/// The current counters for a process, which may be a zombie. `group` is used if the kernel no longer reports the
/// process's group (version 1 moves dead processes to the root).
OomCounters read_oom_counters(int pid, const std::string& group = {});

/// The words after "signal SIGKILL (killed)"; empty if nothing indicates the out-of-memory killer. `before` was read
/// when the worker was started. Pure.
std::string judge_kill(int signal, bool sent_by_launcher, const OomCounters& before, const OomCounters& after);

/// The number after `name` at the start of a line. Pure.
std::optional<long long> counter_in(std::string_view text, std::string_view name);

}  // namespace maniple::launch
