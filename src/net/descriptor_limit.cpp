#include "net/descriptor_limit.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include <fcntl.h>
#include <fmt/format.h>

namespace maniple {

bool raise_descriptor_limit() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
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

}  // namespace maniple
