// The jobs of this user that run on this machine, read from their records (job_record.h), and their table: `maniple
// ps`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/jobs/job_record.h"

namespace maniple::launch {

/// In the order of their start. Records whose launcher is gone are removed; files that are no records, too large, not
/// ours or of another pid name space are passed over.
std::vector<JobInfo> running_jobs();
std::vector<JobInfo> running_jobs_in(const std::string& directory);

/// A running job of this user that is not `id`. Only the preferred directory is read, that in which this user's next
/// job would write its record.
std::optional<JobInfo> another_job(const std::string& id);

/// `now` in seconds after 1970. The command is shortened so that no line is longer than `width`; 0: lines may be any
/// length.
std::string job_table(const std::vector<JobInfo>& jobs, std::int64_t now, int width);

/// "5s", "3m07s", "2h15m", "4d03h"
std::string elapsed_text(std::int64_t seconds);

/// Without control characters, which could play tricks on a terminal.
std::string printable(const std::string& text);

}  // namespace maniple::launch
