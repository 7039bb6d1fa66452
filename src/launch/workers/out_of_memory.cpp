#include "launch/workers/out_of_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "comm/base/unique_fd.h"
#include "launch/process/process_table.h"

namespace maniple::launch {
namespace {

std::optional<long long> number(std::string_view text) {
  long long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  (void)end;
  if (error != std::errc()) return std::nullopt;
  return value;
}

std::string bytes_text(long long bytes) {
  const double value = static_cast<double>(bytes);
  if (value >= 1 << 30) return fmt::format("{:.1f} GiB", value / (1 << 30));
  return fmt::format("{:.0f} MiB", value / (1 << 20));
}

constexpr std::string_view kRoot = "/sys/fs/cgroup";

void read_limit(OomCounters& counters, const std::string& group) {
  constexpr long long kNoLimit = 1LL << 60;  // version 1 reports "no limit" as a number near 2^63
  counters.limit = number(file_text(group + "/memory.max"));
  counters.peak = number(file_text(group + "/memory.peak"));
  if (!counters.limit && !counters.peak) {
    counters.limit = number(file_text(group + "/memory.limit_in_bytes"));
    counters.peak = number(file_text(group + "/memory.max_usage_in_bytes"));
  }
  if (counters.limit && *counters.limit > kNoLimit) counters.limit.reset();
}

bool grew(const std::optional<long long>& before, const std::optional<long long>& after) {
  return after && *after > before.value_or(0);
}

}  // namespace

std::optional<long long> counter_in(std::string_view text, std::string_view name) {
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.size() > name.size() && line.starts_with(name) && line[name.size()] == ' ') {
      return number(line.substr(name.size() + 1));
    }
  }
  return std::nullopt;
}

OomCounters read_oom_counters(int pid, const std::string& group) {
  OomCounters counters;
  const ControlGroups groups = control_groups(pid);
  counters.group = groups.memory.empty() ? groups.unified : groups.memory;
  if (!group.empty() && (counters.group.empty() || counters.group == "/sys/fs/cgroup/memory")) counters.group = group;
  if (!counters.group.empty()) {
    counters.kills = counter_in(file_text(counters.group + "/memory.events"), "oom_kill");
    if (!counters.kills) counters.kills = counter_in(file_text(counters.group + "/memory.oom_control"), "oom_kill");
    // The limit may be set on a parent group.
    for (std::string above = counters.group; !counters.limit && above.size() >= kRoot.size();) {
      read_limit(counters, above);
      above.erase(above.rfind('/'));
    }
  }
  counters.machine_kills = counter_in(file_text("/proc/vmstat"), "oom_kill");
  return counters;
}

std::optional<OomRecord> parse_oom_record(std::string_view line, int pid) {
  const auto at = line.find("oom-kill:constraint=");
  if (at == std::string_view::npos) return std::nullopt;
  const auto field = [&](std::string_view name) {
    const auto found = line.find(name, at);
    if (found == std::string_view::npos) return std::string_view();
    const auto begin = found + name.size();
    return line.substr(begin, std::min(line.find_first_of(",\n", begin), line.size()) - begin);
  };
  if (number(field(",pid=")) != pid) return std::nullopt;
  return OomRecord{.machine_short = field("constraint=") == "CONSTRAINT_NONE",
                   .group = std::string(field(",oom_memcg="))};
}

void add_kernel_log(OomCounters& counters, int pid) {
  const UniqueFd log(::open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  std::array<char, 8192> line;
  std::optional<OomRecord> record;
  while (log) {
    const ssize_t got = ::read(log.get(), line.data(), line.size());
    if (got < 0 && (errno == EINTR || errno == EPIPE)) continue;  // EPIPE: overwritten meanwhile, the next one follows
    if (got <= 0) break;
    if (const auto own = parse_oom_record({line.data(), static_cast<std::size_t>(got)}, pid)) record = own;
  }
  if (!record) return;
  counters.machine_short = record->machine_short;
  if (record->group.empty()) return;
  for (const char* hierarchy : {"/memory", ""}) {
    OomCounters group;
    read_limit(group, fmt::format("{}{}{}", kRoot, hierarchy, record->group));
    if (!group.limit && !group.peak) continue;
    counters.group = record->group;
    counters.kills = 1;
    counters.limit = group.limit;
    counters.peak = group.peak;
    return;
  }
}

std::string judge_kill(int signal, bool sent_by_launcher, const OomCounters& before, const OomCounters& after) {
  if (signal != SIGKILL || sent_by_launcher) return {};
  // If the worker was moved into another group meanwhile, that group's counter began at 0.
  const std::optional<long long> none;
  if (grew(before.group == after.group ? before.kills : none, after.kills)) {
    std::string text = "by the kernel's out-of-memory killer";
    if (after.limit) text += fmt::format(": the limit of its control group is {}", bytes_text(*after.limit));
    if (after.peak) text += fmt::format("{} the peak was {}", after.limit ? "," : ":", bytes_text(*after.peak));
    return text;
  }
  if (before.machine_kills && grew(before.machine_kills, after.machine_kills)) {
    return after.machine_short ? "by the kernel's out-of-memory killer: the machine ran out of memory"
                               : "probably by the kernel's out-of-memory killer: a control group with a limit, or the "
                                 "machine, ran out of memory meanwhile";
  }
  return {};
}

}  // namespace maniple::launch
