#include "comm/base/launcher_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include <fmt/format.h>

#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"

namespace maniple {
namespace {

struct Taken {
  Mutex mutex;
  int init MANIPLE_GUARDED_BY(mutex) = -1;
  int report MANIPLE_GUARDED_BY(mutex) = -1;
};
constinit ProcessWide<Taken> taken;  // a child of fork() has none

std::uint64_t inode_of_socket(int fd) noexcept {
  struct stat status{};
  if (::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return 0;
  int type = 0;
  socklen_t length = sizeof type;
  if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_SEQPACKET) return 0;
  return status.st_ino;
}

int parse(std::string_view text) noexcept {
  int fd = -1;
  std::uint64_t inode = 0;
  const char* const end = text.data() + text.size();
  const auto number = std::from_chars(text.data(), end, fd);
  if (number.ec != std::errc() || number.ptr == end || *number.ptr != ':') return -1;
  const auto rest = std::from_chars(number.ptr + 1, end, inode);
  if (rest.ec != std::errc() || rest.ptr != end || fd < 0) return -1;
  return inode != 0 && inode_of_socket(fd) == inode ? fd : -1;
}

}  // namespace

std::string launcher_socket_value(int fd) { return fmt::format("{}:{}", fd, inode_of_socket(fd)); }

int launcher_socket(const char* variable) noexcept {
  Taken& mine = *taken;
  const MutexLock lock(mine.mutex);
  int& fd = std::strcmp(variable, kInitSocket) == 0 ? mine.init : mine.report;
  if (const char* text = std::getenv(variable)) {
    fd = parse(text);
    if (fd >= 0) ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // hidden from programs that this process starts
    ::unsetenv(variable);
  }
  return fd;
}

}  // namespace maniple
