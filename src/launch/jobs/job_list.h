// This user's running jobs on this machine, read from their records (job_record.h), and the table that `maniple ps`
// prints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/jobs/job_record.h"

namespace maniple::launch {

/// In order of start. Records whose launcher is gone are removed. Files are skipped if they are not records, are too
/// large, belong to another user or come from another pid namespace.
std::vector<JobInfo> running_jobs();
std::vector<JobInfo> running_jobs_in(const std::string& directory);

/// A running job of this user other than `id`. Reads only the preferred directory, where this user's next job would
/// write its record.
std::optional<JobInfo> another_job(const std::string& id);

/// `now` in seconds since 1970. Commands are shortened to keep lines within `width` columns; 0: unlimited.
std::string job_table(const std::vector<JobInfo>& jobs, std::int64_t now, int width);

/// "5s", "3m07s", "2h15m", "4d03h"
std::string elapsed_text(std::int64_t seconds);

/// Replaces control characters, which a terminal would interpret.
std::string printable(const std::string& text);

}  // namespace maniple::launch
