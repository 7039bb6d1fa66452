#include "doctor/processors.h"

#include <sched.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

#include <fmt/format.h>

#include "base/environment.h"
#include "doctor/control_group.h"
#include "doctor/system_files.h"

namespace maniple::doctor {

std::optional<double> parse_cpu_max(std::string_view text) {
  const auto words = split(text, ' ');
  if (words.size() != 2 || words[0] == "max") return std::nullopt;
  const double time = std::atof(words[0].c_str());
  const double period = std::atof(words[1].c_str());
  if (time <= 0 || period <= 0) return std::nullopt;
  return time / period;
}

std::string parse_choice(std::string_view text) {
  const auto open = text.find('[');
  const auto close = text.find(']');
  if (open == std::string_view::npos || close == std::string_view::npos || close < open) return "";
  return std::string(text.substr(open + 1, close - open - 1));
}

Findings judge(const ProcessorFacts& facts) {
  Findings findings;
  if (facts.quota && *facts.quota < facts.allowed - 0.01) {
    findings.push_back(
        {Verdict::warn,
         fmt::format(
             "{} cores are seen, but this container gets the time of {:.3g}: ranks that spin are stopped by the "
             "kernel now and then",
             facts.allowed, *facts.quota),
         fmt::format("start at most {:.0f} rank(s) with OMP_NUM_THREADS=1, or give the container whole cores "
                     "(--cpuset-cpus)",
                     std::max(1.0, std::floor(*facts.quota)))});
  } else if (facts.allowed < facts.online) {
    findings.push_back(
        {Verdict::ok, fmt::format("{} of {} cores may be used (affinity)", facts.allowed, facts.online)});
  } else {
    findings.push_back({Verdict::ok, fmt::format("{} cores", facts.allowed)});
  }
  if (!facts.omp_threads.empty() && std::atoi(facts.omp_threads.c_str()) > facts.allowed) {
    findings.push_back({Verdict::warn,
                        fmt::format("OMP_NUM_THREADS is {} on {} cores", facts.omp_threads, facts.allowed),
                        "unset it: launchers set cores / ranks"});
  }
  if (facts.huge_pages == "never") {
    findings.push_back({Verdict::warn, "transparent huge pages are off: large buffers are slower",
                        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root, on the host)"});
  } else if (!facts.huge_pages.empty()) {
    findings.push_back({Verdict::ok, fmt::format("transparent huge pages: {}", facts.huge_pages)});
  }
  return findings;
}

ProcessorFacts look_at_processors() {
  ProcessorFacts facts;
  facts.online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t mine;
  CPU_ZERO(&mine);
  facts.allowed = ::sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine) : facts.online;
  const GroupPaths paths = control_group_paths(read_small_file("/proc/self/cgroup").value_or(""));
  for (const std::string& path : {paths.unified, std::string("/sys/fs/cgroup")}) {
    if (const auto text = read_small_file(path + "/cpu.max")) facts.quota = parse_cpu_max(*text);
    if (facts.quota) break;
  }
  for (const std::string& path : {paths.cpu, std::string("/sys/fs/cgroup/cpu")}) {
    if (facts.quota) break;
    const auto time = read_small_file(path + "/cpu.cfs_quota_us");
    const auto period = read_small_file(path + "/cpu.cfs_period_us");
    if (time && period) facts.quota = parse_cpu_max(*time + " " + *period);
  }
  facts.huge_pages = parse_choice(read_small_file("/sys/kernel/mm/transparent_hugepage/enabled").value_or(""));
  facts.omp_threads = environment_text("OMP_NUM_THREADS").value_or("");
  return facts;
}

}  // namespace maniple::doctor
