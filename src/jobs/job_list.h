// The jobs of this user that run on this machine, read from their records (job_record.h).
#pragma once

#include <string>
#include <vector>

#include "jobs/job_record.h"

namespace maniple::launch {

/// In the order of their start. Records whose launcher is gone are removed; files that are no records, too large, not
/// ours or of another pid name space are passed over.
std::vector<JobInfo> running_jobs();
std::vector<JobInfo> running_jobs_in(const std::string& directory);

}  // namespace maniple::launch
