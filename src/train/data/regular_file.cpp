#include "train/data/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/system_error.h"

namespace maniple {

bool is_readable(const std::string& path) noexcept { return ::access(path.c_str(), R_OK) == 0; }

RegularFile::RegularFile(std::string path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) throw_system_error("cannot open " + path_);
  struct stat status = {};
  if (::fstat(fd_.get(), &status) != 0) throw_system_error("cannot look at " + path_);
  MANIPLE_REQUIRE(!S_ISDIR(status.st_mode), "{}: is a directory; expected a file", path_);
  MANIPLE_REQUIRE(S_ISREG(status.st_mode), "{}: is not a regular file", path_);
  size_ = static_cast<std::size_t>(status.st_size);
}

void RegularFile::read(std::size_t offset, void* to, std::size_t count) const {
  std::size_t done = 0;
  while (done < count) {
    const ssize_t got =
        ::pread(fd_.get(), static_cast<char*>(to) + done, count - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_system_error(format_text("cannot read {} at offset {}", path_, offset + done));
    MANIPLE_REQUIRE(got > 0,
                    "{}: ends at offset {}, but had {} bytes when it was opened; it must not change while it is in use",
                    path_, offset + done, size_);
    done += static_cast<std::size_t>(got);
  }
}

}  // namespace maniple
