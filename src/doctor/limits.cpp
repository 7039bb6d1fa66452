#include "doctor/limits.h"

#include <sys/resource.h>

#include <charconv>

#include <fmt/format.h>

#include "doctor/control_group.h"
#include "doctor/system_files.h"

namespace maniple::doctor {
namespace {

constexpr std::uint64_t kFewestFiles = 256;   // a rank in a small job
constexpr std::uint64_t kEnoughFiles = 4096;  // a rank in a job of a thousand
constexpr std::uint64_t kFewestProcesses = 512;

std::uint64_t soft(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return kUnlimited;
  return limit.rlim_cur;
}

std::string count_text(std::uint64_t count) { return count == kUnlimited ? "unlimited" : std::to_string(count); }

}  // namespace

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
          {Verdict::warn, text + ": more than that and the kernel kills a rank", "give the container more memory"});
    } else {
      findings.push_back({Verdict::ok, text});
    }
  }
  return findings;
}

LimitFacts look_at_limits() {
  LimitFacts facts;
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  facts.files_soft = files.rlim_cur == RLIM_INFINITY ? kUnlimited : files.rlim_cur;
  facts.files_hard = files.rlim_max == RLIM_INFINITY ? kUnlimited : files.rlim_max;
  facts.locked_bytes = soft(RLIMIT_MEMLOCK);
  facts.address_bytes = soft(RLIMIT_AS);
  facts.processes = soft(RLIMIT_NPROC);
  const GroupPaths paths = control_group_paths(read_small_file("/proc/self/cgroup").value_or(""));
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

}  // namespace maniple::doctor
