#include "launch/placement/core_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/check.h"
#include "base/files.h"
#include "base/log.h"
#include "base/system_error.h"
#include "launch/workers/supervisor.h"
#include "jobs/job_directory.h"
#include "process/process_clock.h"

namespace maniple::launch {
namespace {

constexpr std::string_view kFirstWord = "maniple-cores-1";
constexpr std::string_view kPrefix = "cores-";
constexpr std::size_t kMostBytes = 64 * 1024;
constexpr std::size_t kMostFiles = 4096;
constexpr int kMostCpu = 1 << 20;
constexpr int kLockTries = 500;  // of 1 ms: whoever chooses needs microseconds

bool lock_directory(int directory) {
  for (int i = 0; i < kLockTries; ++i) {
    if (::flock(directory, LOCK_EX | LOCK_NB) == 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // sleep: a blocking lock would wait for the stopped
  }
  return false;
}

std::string text_of(int file) {
  std::string text(kMostBytes, '\0');
  const ssize_t got = ::pread(file, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return text;
}

/// What living launchers hold; files of dead ones are removed.
std::vector<HeldCores> held_in(int directory, const std::string& path) {
  std::vector<HeldCores> all;
  for (const std::string& name : names_in(path)) {
    if (!name.starts_with(kPrefix) || all.size() >= kMostFiles) continue;
    const UniqueFd file(::openat(directory, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file) continue;
    if (::flock(file.get(), LOCK_SH | LOCK_NB) == 0) {
      ::unlinkat(directory, name.c_str(), 0);
      continue;
    }
    try {
      all.push_back(decode_held(text_of(file.get())));
    } catch (const InvalidArgument& error) {
      log_debug("{}/{}: {}", path, name, error.what());
    }
  }
  return all;
}

std::set<std::tuple<int, int, int>> physical_cores(const std::vector<Cpu>& cpus, const std::vector<int>& ids) {
  std::set<std::tuple<int, int, int>> cores;
  for (const Cpu& cpu : cpus) {
    if (std::find(ids.begin(), ids.end(), cpu.id) != ids.end()) cores.emplace(cpu.package, cpu.numa, cpu.core);
  }
  return cores;
}

std::vector<int> ids_of(const std::vector<Cpu>& cpus) {
  std::vector<int> ids;
  for (const Cpu& cpu : cpus) ids.push_back(cpu.id);
  return ids;
}

}  // namespace

std::string encode_held(const HeldCores& held) {
  return fmt::format("{} {} {} {} {}\n", kFirstWord, held.job, held.generation, held.pid, fmt::join(held.cpus, " "));
}

HeldCores decode_held(const std::string& text) {
  HeldCores held;
  std::istringstream in(text);
  std::string first;
  MANIPLE_REQUIRE(in >> first >> held.job >> held.generation >> held.pid && first == kFirstWord, "no claim of cores");
  for (int cpu = 0; in >> cpu;) {
    MANIPLE_REQUIRE(cpu >= 0 && cpu < kMostCpu, "a claim of core {}", cpu);
    held.cpus.push_back(cpu);
  }
  MANIPLE_REQUIRE(in.eof() && text.ends_with('\n'), "half a claim of cores");
  return held;
}

CoreClaim& CoreClaim::operator=(CoreClaim&& other) noexcept {
  if (this == &other) return *this;
  release();
  directory_ = std::move(other.directory_);
  file_ = std::move(other.file_);
  name_ = std::move(other.name_);
  return *this;
}

CoreClaim CoreClaim::take(const std::string& job, int generation,
                          const std::function<std::vector<int>(const std::vector<HeldCores>&)>& choose) {
  CoreClaim claim;
  std::vector<HeldCores> others;
  for (const std::string& path : job_directories()) {
    try {
      UniqueFd directory = open_job_directory(path, true);
      if (!lock_directory(directory.get())) throw SystemError("somebody holds the lock", EWOULDBLOCK);
      others = held_in(directory.get(), path);
      claim.directory_ = std::move(directory);
      break;
    } catch (const Error& error) {
      log_debug("no claims of cores in {}: {}", path, error.what());
    }
  }
  const HeldCores mine{.job = job, .generation = generation, .pid = supervisor_pid(), .cpus = choose(others)};
  if (!claim.directory_ || mine.cpus.empty()) return {};
  claim.name_ = fmt::format("{}{}-{}", kPrefix, ::getpid(), start_of_process(::getpid()).value_or(0));
  claim.file_.reset(
      ::openat(claim.directory_.get(), claim.name_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
  const std::string text = encode_held(mine);
  const bool written = claim.file_ && ::flock(claim.file_.get(), LOCK_EX | LOCK_NB) == 0 &&
                       ::write(claim.file_.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (!written) log_debug("the claim of cores {} is not written: {}", claim.name_, errno_text(errno));
  ::flock(claim.directory_.get(), LOCK_UN);
  return claim;
}

void CoreClaim::release() noexcept {
  if (file_) ::unlinkat(directory_.get(), name_.c_str(), 0);
  file_.reset();
  directory_.reset();
}

CoreChoice choose_cores(const CoreWish& wish, const std::vector<Cpu>& allowed, const std::vector<HeldCores>& others) {
  std::vector<int> taken, siblings;  // by other jobs; by other launchers of this one
  std::string holders;
  for (const HeldCores& held : others) {
    const bool ours = held.job == wish.job;
    if (ours && held.generation != wish.generation) continue;  // it is about to choose anew
    std::vector<int>& cpus = ours ? siblings : taken;
    cpus.insert(cpus.end(), held.cpus.begin(), held.cpus.end());
    if (ours || physical_cores(allowed, held.cpus).empty()) continue;
    holders += fmt::format("{}job {} (pid {}) has {}", holders.empty() ? "" : ", ", held.job, held.pid,
                           describe_cpus(held.cpus));
  }
  const auto all_cores = physical_cores(allowed, ids_of(allowed));
  const auto taken_cores = physical_cores(allowed, taken);
  std::vector<Cpu> free;  // a core of which another job has one hardware thread is not free
  for (const Cpu& cpu : allowed) {
    if (taken_cores.count({cpu.package, cpu.numa, cpu.core}) == 0) free.push_back(cpu);
  }

  CoreChoice choice;
  choice.threads = std::max(1, static_cast<int>(all_cores.size()) / std::max(1, wish.total));
  if (wish.cores_per_rank > 0) choice.threads = wish.cores_per_rank;
  auto bound = bind_ranks(free, wish.total, wish.cores_per_rank);
  if (bound.empty()) {
    choice.why_not =
        fmt::format("{} rank{}{} on this machine, {} of its {} cores free{}{}", wish.total, wish.total == 1 ? "" : "s",
                    wish.cores_per_rank > 0 ? fmt::format(" with {} cores each", wish.cores_per_rank) : "",
                    all_cores.size() - taken_cores.size(), all_cores.size(), holders.empty() ? "" : ": ", holders);
    return choice;
  }
  for (int i = wish.first; i < wish.first + wish.count; ++i)
    choice.cpus.push_back(std::move(bound.at(static_cast<std::size_t>(i))));
  // Another job may have come between two launchers of this one: then their divisions differ.
  for (const std::vector<int>& cpus : choice.cpus) {
    const bool clash = std::any_of(cpus.begin(), cpus.end(), [&](int id) {
      return std::find(siblings.begin(), siblings.end(), id) != siblings.end();
    });
    if (!clash) continue;
    choice.cpus.clear();
    choice.why_not = "another job took cores while this one started";
    return choice;
  }
  choice.threads = std::max<int>(1, static_cast<int>(physical_cores(allowed, choice.cpus.front()).size()));
  return choice;
}

}  // namespace maniple::launch
