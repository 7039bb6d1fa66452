// The record of a running job, for `maniple ps`: one small file that exists as long as its launcher runs.
//
// The files lie in $XDG_RUNTIME_DIR/maniple, or in /tmp/maniple-<uid> if that directory is missing. The directory is
// used only if this user owns it, its mode is 0700 and it is not a symbolic link. A record is written to a temporary
// name and renamed, so a reader never sees a partial record. Errors never fail the job; they are logged at debug level.
//
// A killed launcher leaves its file behind; the reader (job_list.h) removes it when it finds the process gone.
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

/// Directories that may hold this user's records, the preferred one first.
std::vector<std::string> job_directories();

/// Opens a directory that only this user can access; creates it if `create`. Throws SystemError, or InvalidArgument if
/// the path is a symbolic link, has another owner or has a mode that admits other users.
UniqueFd open_job_directory(const std::string& path, bool create);

struct JobInfo {
  std::string id;
  std::string command;  ///< as typed, for people
  int world_size = 0;
  std::vector<std::string> hosts = {};
  pid_t pid = 0;  ///< the launcher process that the user sees and may signal; 0: this process
  /// Its start in clock ticks since boot, which distinguishes it from a later process with the same pid.
  std::uint64_t pid_started = 0;
  std::string pid_space = {};  ///< the pid namespace of `pid`
  std::int64_t started = 0;    ///< seconds since 1970; 0: now
  int ranks_up = 0;
  int restarts = 0;
  std::string state = "starting";
};

class JobRecord {
 public:
  /// Fills in the fields that are 0 and writes the file.
  explicit JobRecord(JobInfo info) noexcept;
  ~JobRecord();
  JobRecord(const JobRecord&) = delete;
  JobRecord& operator=(const JobRecord&) = delete;

  /// Cheap when nothing has changed. `world_size` 0: unchanged.
  void update(int ranks_up, int restarts, std::string_view state, int world_size = 0) noexcept;

  const JobInfo& info() const noexcept { return info_; }

 private:
  void write() noexcept;

  JobInfo info_;
  ForkGuard guard_;        // a forked child has a copy of this object but must not remove the file
  std::string directory_;  // empty: no file
  std::string name_;
};

/// The file's text: one line per field, control characters escaped. Values are shortened to fit kMostRecordBytes.
std::string encode_job(const JobInfo& info);
/// nullopt for anything that encode_job would not write.
std::optional<JobInfo> decode_job(std::string_view text);
inline constexpr std::size_t kMostRecordBytes = 64 * 1024;

}  // namespace maniple::launch
