#include "doctor/disk.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include <fmt/format.h>

#include "base/environment.h"
#include "base/system_error.h"
#include "base/unique_fd.h"

namespace maniple::doctor {
namespace {

constexpr std::uint64_t kFewest = std::uint64_t{16} << 20;
constexpr std::uint64_t kComfortable = std::uint64_t{1} << 30;

}  // namespace

Findings judge(const DiskFacts& facts) {
  if (!facts.problem.empty()) {
    return {{Verdict::fail, fmt::format("nothing can be written in {}: {}", facts.path, facts.problem),
             "set TMPDIR to a directory that can be written"}};
  }
  const std::string text = fmt::format("{} has {} free", facts.path, size_text(static_cast<double>(facts.free_bytes)));
  if (facts.free_bytes < kFewest) return {{Verdict::fail, text, "make room, or set TMPDIR to another directory"}};
  if (facts.free_bytes < kComfortable) return {{Verdict::warn, text, "make room, or set TMPDIR to another directory"}};
  return {{Verdict::ok, text}};
}

DiskFacts look_at_disk() {
  DiskFacts facts{.path = environment_text("TMPDIR").value_or("/tmp")};
  std::string probe = facts.path + "/maniple-doctor-XXXXXX";
  const UniqueFd file(::mkostemp(probe.data(), O_CLOEXEC));
  if (!file) {
    facts.problem = errno_text(errno);
    return facts;
  }
  ::unlink(probe.c_str());
  struct statvfs space {};
  if (::fstatvfs(file.get(), &space) == 0) facts.free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
  return facts;
}

}  // namespace maniple::doctor
