#include "tools/doctor/checks.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include <fmt/format.h>

#include "comm/base/environment.h"
#include "comm/base/system_error.h"
#include "comm/base/unique_fd.h"
#include "launch/process/process_table.h"

namespace maniple::doctor {
namespace {

constexpr std::uint64_t kFewestFiles = 256;   // for a rank in a small job
constexpr std::uint64_t kEnoughFiles = 4096;  // for a rank in a job of a thousand ranks
constexpr std::uint64_t kFewestProcesses = 512;

std::uint64_t soft(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return kUnlimited;
  return limit.rlim_cur;
}

std::string count_text(std::uint64_t count) { return count == kUnlimited ? "unlimited" : std::to_string(count); }

constexpr std::uint64_t kFewest = std::uint64_t{16} << 20;
constexpr std::uint64_t kComfortable = std::uint64_t{1} << 30;

}  // namespace

// --- limits ---

std::optional<std::uint64_t> parse_group_limit(std::string_view text) {
  if (text == "max") return kUnlimited;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value >= (std::uint64_t{1} << 60) ? kUnlimited : value;
}

Findings judge(const LimitFacts& facts) {
  Findings findings;
  if (facts.files_hard < kFewestFiles) {
    findings.push_back({Verdict::fail, fmt::format("at most {} open files", facts.files_hard),
                        "raise the hard limit: ulimit -Hn 65536, or LimitNOFILE= of the service"});
  } else if (facts.files_hard < kEnoughFiles) {
    findings.push_back({Verdict::warn, fmt::format("at most {} open files: too few for large jobs", facts.files_hard),
                        "raise the hard limit: ulimit -Hn 65536, or LimitNOFILE= of the service"});
  } else {
    findings.push_back({Verdict::ok, fmt::format("open files: {}, raised to {} when needed",
                                                 count_text(facts.files_soft), count_text(facts.files_hard))});
  }
  if (facts.processes < kFewestProcesses) {
    findings.push_back({Verdict::warn, fmt::format("at most {} processes and threads of this user", facts.processes),
                        "ulimit -u 4096"});
  }
  if (facts.address_bytes != kUnlimited) {
    findings.push_back(
        {Verdict::warn,
         fmt::format("the address space of a process is limited to {}; LibTorch reserves much more than it uses",
                     size_text(static_cast<double>(facts.address_bytes))),
         "ulimit -v unlimited"});
  }
  findings.push_back({Verdict::ok, facts.locked_bytes == kUnlimited
                                       ? std::string("locked memory is not limited")
                                       : fmt::format("locked memory: {} (matters for InfiniBand only)",
                                                     size_text(static_cast<double>(facts.locked_bytes)))});
  if (facts.memory_limit && *facts.memory_limit != kUnlimited) {
    const auto limit = static_cast<double>(*facts.memory_limit);
    const auto used = static_cast<double>(facts.memory_used);
    const std::string text =
        fmt::format("memory of this container: {} of {} in use", size_text(used), size_text(limit));
    if (used > 0.9 * limit) {
      findings.push_back(
          {Verdict::warn, text + ": beyond it, the kernel kills a rank", "give the container more memory"});
    } else {
      findings.push_back({Verdict::ok, text});
    }
  }
  return findings;
}

LimitFacts inspect_limits() {
  LimitFacts facts;
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  facts.files_soft = files.rlim_cur == RLIM_INFINITY ? kUnlimited : files.rlim_cur;
  facts.files_hard = files.rlim_max == RLIM_INFINITY ? kUnlimited : files.rlim_max;
  facts.locked_bytes = soft(RLIMIT_MEMLOCK);
  facts.address_bytes = soft(RLIMIT_AS);
  facts.processes = soft(RLIMIT_NPROC);
  const launch::ControlGroups paths = launch::control_groups(::getpid());
  for (const auto& [limit, used] :
       {std::pair{paths.unified + "/memory.max", paths.unified + "/memory.current"},
        std::pair{paths.memory + "/memory.limit_in_bytes", paths.memory + "/memory.usage_in_bytes"},
        std::pair<std::string, std::string>{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        std::pair<std::string, std::string>{"/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                            "/sys/fs/cgroup/memory/memory.usage_in_bytes"}}) {
    const auto text = read_small_file(limit);
    if (!text) continue;
    facts.memory_limit = parse_group_limit(*text);
    facts.memory_used = parse_group_limit(read_small_file(used).value_or("0")).value_or(0);
    break;
  }
  return facts;
}

// --- processors ---

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

ProcessorFacts inspect_processors() {
  ProcessorFacts facts;
  facts.online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t mine;
  CPU_ZERO(&mine);
  facts.allowed = ::sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine) : facts.online;
  const launch::ControlGroups paths = launch::control_groups(::getpid());
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

// --- disk ---

Findings judge(const DiskFacts& facts) {
  if (!facts.problem.empty()) {
    return {{Verdict::fail, fmt::format("cannot write to {}: {}", facts.path, facts.problem),
             "set TMPDIR to a writable directory"}};
  }
  const std::string text = fmt::format("{} has {} free", facts.path, size_text(static_cast<double>(facts.free_bytes)));
  if (facts.free_bytes < kFewest) return {{Verdict::fail, text, "make room, or set TMPDIR to another directory"}};
  if (facts.free_bytes < kComfortable) return {{Verdict::warn, text, "make room, or set TMPDIR to another directory"}};
  return {{Verdict::ok, text}};
}

DiskFacts inspect_disk() {
  DiskFacts facts{.path = environment_text("TMPDIR").value_or("/tmp")};
  std::string probe = facts.path + "/maniple-doctor-XXXXXX";
  const UniqueFd file(::mkostemp(probe.data(), O_CLOEXEC));
  if (!file) {
    facts.problem = errno_text(errno);
    return facts;
  }
  ::unlink(probe.c_str());
  struct statvfs space{};
  if (::fstatvfs(file.get(), &space) == 0) facts.free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
  return facts;
}

}  // namespace maniple::doctor
