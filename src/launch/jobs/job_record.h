// The record of a running job, for `maniple ps`: one small file, there as long as its launcher lives.
//
// The files lie in $XDG_RUNTIME_DIR/maniple, or /tmp/maniple-<uid> where there is no such directory: mode 0700, ours
// alone, no symbolic link, or it is not used. A record is written beside its name and renamed, so a reader never sees
// half of one. A job never fails for want of a record: what goes wrong is a line at debug level.
//
// A launcher that was killed leaves its file; the reader (job_list.h) finds the process gone and drops it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/base/fork_guard.h"
#include "comm/base/unique_fd.h"

namespace maniple::launch {

/// Directories that may hold records of this user, the preferred one first.
std::vector<std::string> job_directories();

/// Opens a directory that is ours alone; makes it when `create` is set. Throws SystemError or InvalidArgument (a link,
/// another owner, a mode that lets others in).
UniqueFd open_job_directory(const std::string& path, bool create);

struct JobInfo {
  std::string id;
  std::string command;  ///< as typed, for people
  int world_size = 0;
  std::vector<std::string> hosts = {};
  pid_t pid = 0;  ///< of the launcher, as the user sees it and may signal it; 0: this process
  /// Its start in clock ticks after boot, which tells it from a later process of that number.
  std::uint64_t pid_started = 0;
  std::string pid_space = {};  ///< the pid name space the number belongs to
  std::int64_t started = 0;    ///< seconds after 1970; 0: now
  int ranks_up = 0;
  int restarts = 0;
  std::string state = "starting";
};

class JobRecord {
 public:
  /// Fills in what is 0 and writes the file.
  explicit JobRecord(JobInfo info) noexcept;
  ~JobRecord();
  JobRecord(const JobRecord&) = delete;
  JobRecord& operator=(const JobRecord&) = delete;

  /// Cheap when nothing has changed. `world_size` 0: as it was.
  void update(int ranks_up, int restarts, std::string_view state, int world_size = 0) noexcept;

  const JobInfo& info() const noexcept { return info_; }

 private:
  void write() noexcept;

  JobInfo info_;
  ForkGuard guard_;        // a child of fork() has a copy of this object, but it is not its job
  std::string directory_;  // empty: there is no file
  std::string name_;
};

/// The file's text: a line for each field, control characters escaped. Values are shortened so that it fits
/// kMostRecordBytes.
std::string encode_job(const JobInfo& info);
/// nullopt for anything that encode_job would not write.
std::optional<JobInfo> decode_job(std::string_view text);
inline constexpr std::size_t kMostRecordBytes = 64 * 1024;

}  // namespace maniple::launch
