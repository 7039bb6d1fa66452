#include "jobs/job_directory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <fmt/format.h>

#include "base/check.h"
#include "base/environment.h"
#include "base/system_error.h"

namespace maniple::launch {

std::vector<std::string> job_directories() {
  std::vector<std::string> paths;
  const auto runtime = environment_text("XDG_RUNTIME_DIR");
  if (runtime && runtime->front() == '/') paths.push_back(*runtime + "/maniple");
  paths.push_back(fmt::format("/tmp/maniple-{}", ::geteuid()));
  return paths;
}

UniqueFd open_job_directory(const std::string& path, bool create) {
  if (create && ::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) throw_system_error("mkdir " + path);
  UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!directory) throw_system_error("open " + path);
  struct stat status {};
  if (::fstat(directory.get(), &status) != 0) throw_system_error("stat " + path);
  MANIPLE_REQUIRE(status.st_uid == ::geteuid(), "{} belongs to user {}, not to {}", path, status.st_uid, ::geteuid());
  MANIPLE_REQUIRE((status.st_mode & 077) == 0, "{} has mode {:03o}, which lets others in; expected 700", path,
                  status.st_mode & 0777);
  return directory;
}

}  // namespace maniple::launch
