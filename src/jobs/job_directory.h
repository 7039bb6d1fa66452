// Where records of jobs lie, and a look at who may write there.
#pragma once

#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace maniple::launch {

/// Directories that may hold records of this user, the preferred one first.
std::vector<std::string> job_directories();

/// Opens a directory that is ours alone; makes it when `create` is set. Throws SystemError or InvalidArgument (a link,
/// another owner, a mode that lets others in).
UniqueFd open_job_directory(const std::string& path, bool create);

}  // namespace maniple::launch
