#include "launch/jobs/job_list.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>

#include <fmt/format.h>

#include "comm/base/log.h"
#include "launch/jobs/job_control.h"
#include "launch/process/process_table.h"

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
  // Without O_NONBLOCK, opening a named pipe would block.
  const UniqueFd file(::openat(directory, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status{};
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

// --- the table ---

constexpr std::size_t kColumns = 7;
constexpr std::size_t kLeastCommand = 10;
using Row = std::array<std::string, kColumns>;

// Largest widths of the columns whose text comes from the user.
struct Most {
  std::size_t job, hosts;
};
constexpr Most kComfortable{16, 18};
constexpr Most kNarrow{8, 9};

// Counts the bytes that begin a UTF-8 character; continuation bytes take no column.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string shortened(const std::string& text, std::size_t most) {
  if (width_of(text) <= most) return text;
  std::string result;
  std::size_t width = 0;
  for (const char c : text) {
    if ((c & 0xC0) != 0x80 && ++width > most - 2) break;
    result += c;
  }
  return result + "..";
}

std::string hosts_text(const std::vector<std::string>& hosts, std::size_t most) {
  if (hosts.empty()) return "-";
  const std::string more = hosts.size() > 1 ? fmt::format(" +{}", hosts.size() - 1) : "";
  const std::size_t room = most > more.size() + 3 ? most - more.size() : 3;
  return shortened(printable(hosts[0]), room) + more;
}

std::array<std::size_t, kColumns> widths_of(const std::vector<Row>& rows) {
  std::array<std::size_t, kColumns> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i + 1 < kColumns; ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  }
  return widths;
}

std::size_t width_before_command(const std::vector<Row>& rows) {
  std::size_t before = 0;
  const auto widths = widths_of(rows);
  for (std::size_t i = 0; i + 1 < kColumns; ++i) before += widths[i] + 2;
  return before;
}

std::vector<Row> rows_of(const std::vector<JobInfo>& jobs, std::int64_t now, const Most& most) {
  std::vector<Row> rows = {{"JOB", "PID", "RANKS", "HOSTS", "RESTARTS", "ELAPSED", "COMMAND"}};
  for (const JobInfo& job : jobs) {
    rows.push_back({shortened(printable(job.id), most.job), std::to_string(job.pid),
                    fmt::format("{}/{}", job.ranks_up, job.world_size), hosts_text(job.hosts, most.hosts),
                    std::to_string(job.restarts), elapsed_text(now - job.started), printable(job.command)});
  }
  return rows;
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
  const std::string here = own_pid_namespace();
  for (const std::string& name : names_in(directory.get())) {
    const auto text = contents(directory.get(), name);
    auto job = text ? decode_job(*text) : std::nullopt;
    if (!job) {
      log_debug("{}/{} is not a job record", path, name);
      continue;
    }
    if (job->pid_space != here) continue;  // its pids are meaningless here
    if (start_of_process(job->pid) == job->pid_started) {
      if (!name.ends_with(".new")) jobs.push_back(std::move(*job));
    } else {
      ::unlinkat(directory.get(), name.c_str(), 0);
      ::unlinkat(directory.get(), control_name(job->id).c_str(), 0);
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

std::optional<JobInfo> another_job(const std::string& id) {
  for (const std::string& path : job_directories()) {
    try {
      open_job_directory(path, true);
    } catch (const std::exception&) {
      continue;  // JobRecord skips this directory, too
    }
    for (JobInfo& job : running_jobs_in(path)) {
      if (job.id != id) return std::move(job);
    }
    break;
  }
  return std::nullopt;
}

std::string printable(const std::string& text) {
  std::string result = text;
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return result;
}

std::string elapsed_text(std::int64_t seconds) {
  seconds = std::max<std::int64_t>(seconds, 0);
  const std::int64_t minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
  if (days > 0) return fmt::format("{}d{:02}h", days, hours % 24);
  if (hours > 0) return fmt::format("{}h{:02}m", hours, minutes % 60);
  if (minutes > 0) return fmt::format("{}m{:02}s", minutes, seconds % 60);
  return fmt::format("{}s", seconds);
}

std::string job_table(const std::vector<JobInfo>& jobs, std::int64_t now, int width) {
  const std::size_t whole = width > 0 ? static_cast<std::size_t>(width) : std::string::npos;
  std::vector<Row> rows = rows_of(jobs, now, kComfortable);
  if (width_before_command(rows) + kLeastCommand > whole) rows = rows_of(jobs, now, kNarrow);
  const std::size_t before = width_before_command(rows);
  const std::size_t room = whole == std::string::npos ? whole : std::max(whole, before + kLeastCommand) - before;
  const auto widths = widths_of(rows);
  std::string text;
  for (const Row& row : rows) {
    for (std::size_t i = 0; i + 1 < kColumns; ++i) text += row[i] + std::string(widths[i] - width_of(row[i]) + 2, ' ');
    text += shortened(row.back(), room) + "\n";
  }
  return text;
}

}  // namespace maniple::launch
