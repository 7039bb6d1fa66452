#include "launch/workers/out_of_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <csignal>

#include <fmt/format.h>

#include "base/unique_fd.h"

namespace maniple::launch {
namespace {

std::string slurp(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char buffer[4096];
  while (file) {
    const ssize_t got = ::read(file.get(), buffer, sizeof buffer);
    if (got <= 0) break;
    text.append(buffer, static_cast<std::size_t>(got));
  }
  return text;
}

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

std::string memory_group_folder(std::string_view proc_cgroup) {
  std::string unified;
  while (!proc_cgroup.empty()) {
    const auto end = std::min(proc_cgroup.find('\n'), proc_cgroup.size());
    const std::string_view line = proc_cgroup.substr(0, end);
    proc_cgroup.remove_prefix(std::min(end + 1, proc_cgroup.size()));
    const auto first = line.find(':');
    const auto second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const std::string path(line.substr(second + 1));
    if (controllers.find(",memory,") != std::string::npos) return fmt::format("/sys/fs/cgroup/memory{}", path);
    if (line.starts_with("0::")) unified = fmt::format("/sys/fs/cgroup{}", path);
  }
  return unified;
}

OomCounters read_oom_counters(int pid, const std::string& group) {
  OomCounters counters;
  counters.group = memory_group_folder(slurp(fmt::format("/proc/{}/cgroup", pid)));
  if (!group.empty() && (counters.group.empty() || counters.group == "/sys/fs/cgroup/memory/")) counters.group = group;
  if (!counters.group.empty()) {
    counters.kills = counter_in(slurp(counters.group + "/memory.events"), "oom_kill");
    counters.limit = number(slurp(counters.group + "/memory.max"));
    counters.peak = number(slurp(counters.group + "/memory.peak"));
    if (!counters.kills) {
      constexpr long long kNoLimit = 1LL << 60;  // version 1 says so with a number near 2^63
      counters.kills = counter_in(slurp(counters.group + "/memory.oom_control"), "oom_kill");
      counters.limit = number(slurp(counters.group + "/memory.limit_in_bytes"));
      counters.peak = number(slurp(counters.group + "/memory.max_usage_in_bytes"));
      if (counters.limit && *counters.limit > kNoLimit) counters.limit.reset();
    }
  }
  counters.machine_kills = counter_in(slurp("/proc/vmstat"), "oom_kill");
  return counters;
}

std::string judge_kill(int signal, bool sent_by_launcher, const OomCounters& before, const OomCounters& after) {
  if (signal != SIGKILL || sent_by_launcher) return {};
  // A worker that has been moved into a group of its own meanwhile has a counter that began at 0.
  const std::optional<long long> none;
  if (grew(before.group == after.group ? before.kills : none, after.kills)) {
    std::string text = "by the kernel's out-of-memory killer";
    if (after.limit) text += fmt::format(": the limit of its control group is {}", bytes_text(*after.limit));
    if (after.peak) text += fmt::format("{} the peak was {}", after.limit ? "," : ":", bytes_text(*after.peak));
    return text;
  }
  if (before.machine_kills && grew(before.machine_kills, after.machine_kills)) {
    return "probably by the kernel's out-of-memory killer: the machine ran out of memory meanwhile";
  }
  return {};
}

}  // namespace maniple::launch
