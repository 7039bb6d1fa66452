#include "jobs/job_list.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "base/log.h"
#include "jobs/job_directory.h"
#include "process/process_clock.h"

namespace maniple::launch {
namespace {

constexpr std::size_t kMostRecords = 4096;

struct CloseDirectory {
  void operator()(DIR* directory) const noexcept { ::closedir(directory); }
};

std::vector<std::string> names_in(int directory) {
  std::vector<std::string> names;
  const int copy = ::fcntl(directory, F_DUPFD_CLOEXEC, 0);
  const std::unique_ptr<DIR, CloseDirectory> entries(copy >= 0 ? ::fdopendir(copy) : nullptr);
  if (!entries) {
    if (copy >= 0) ::close(copy);
    return names;
  }
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (name.starts_with("job-") && names.size() < kMostRecords) names.emplace_back(name);
  }
  return names;
}

std::optional<std::string> contents(int directory, const std::string& name) {
  // Without O_NONBLOCK a named pipe would hold us up.
  const UniqueFd file(::openat(directory, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != ::geteuid()) {
    return std::nullopt;
  }
  std::string text(kMostRecordBytes + 1, '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  if (done > kMostRecordBytes) return std::nullopt;
  text.resize(done);
  return text;
}

}  // namespace

std::vector<JobInfo> running_jobs_in(const std::string& path) {
  std::vector<JobInfo> jobs;
  UniqueFd directory;
  try {
    directory = open_job_directory(path, false);
  } catch (const std::exception& error) {
    log_debug("no records of jobs in {}: {}", path, error.what());
    return jobs;
  }
  const std::string here = own_pid_space();
  for (const std::string& name : names_in(directory.get())) {
    const auto text = contents(directory.get(), name);
    auto job = text ? decode_job(*text) : std::nullopt;
    if (!job) {
      log_debug("{}/{} is no record of a job", path, name);
      continue;
    }
    if (job->pid_space != here) continue;  // such numbers mean nothing here
    if (start_of_process(job->pid) == job->pid_started) {
      if (!name.ends_with(".new")) jobs.push_back(std::move(*job));
    } else {
      ::unlinkat(directory.get(), name.c_str(), 0);
    }
  }
  std::sort(jobs.begin(), jobs.end(), [](const JobInfo& a, const JobInfo& b) {
    return std::pair(a.started, a.pid) < std::pair(b.started, b.pid);
  });
  return jobs;
}

std::vector<JobInfo> running_jobs() {
  std::vector<JobInfo> all;
  for (const std::string& path : job_directories()) {
    for (JobInfo& job : running_jobs_in(path)) all.push_back(std::move(job));
  }
  return all;
}

}  // namespace maniple::launch
