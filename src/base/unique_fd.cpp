#include "base/unique_fd.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>

#include <fmt/format.h>

#include "base/system_error.h"

namespace maniple {

void raise_descriptor_limit() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

DescriptorUse descriptor_use() noexcept {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  DescriptorUse use{.open = 0, .limit = limit.rlim_cur};
  // Listing /proc/self/fd would itself need a descriptor, and there is none left when this is asked.
  const std::uint64_t highest = std::min<std::uint64_t>(limit.rlim_cur, 65536);
  for (std::uint64_t fd = 0; fd < highest; ++fd) {
    if (::fcntl(static_cast<int>(fd), F_GETFD) != -1) ++use.open;
  }
  return use;
}

std::string descriptor_shortage(std::uint64_t needed_more) {
  const DescriptorUse use = descriptor_use();
  return fmt::format("{} file descriptors are open, {} more needed, but the limit is {}; raise it (ulimit -n {})",
                     use.open, needed_more, use.limit, (use.open + needed_more) * 2);
}

void throw_no_descriptor(const std::string& purpose, int code) {
  if (code == EMFILE) throw SystemError(fmt::format("{}: {}", purpose, descriptor_shortage()), code);
  throw_system_error(purpose, code);
}

UniqueFd open_file(const std::string& path, int flags, unsigned mode) {
  return try_new_descriptor([&] { return ::open(path.c_str(), flags, mode); });
}

UniqueFd new_event() {
  return new_descriptor("eventfd", [] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
}

UniqueFd duplicate(int fd) {
  return new_descriptor("fcntl(F_DUPFD_CLOEXEC)", [&] { return ::fcntl(fd, F_DUPFD_CLOEXEC, 0); });
}

}  // namespace maniple
