#include "comm/base/write_all.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace maniple {
namespace {

/// `write(data, size, done)` is one system call that writes the bytes after the first `done`.
template <class Write>
std::size_t write_each(std::string_view bytes, const Write& write) noexcept {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = write(bytes.data() + done, bytes.size() - done, done);
    if (written < 0 && errno == EINTR) continue;
    if (written == 0) errno = ENOSPC;  // POSIX permits a result of 0: do not retry forever
    if (written <= 0) break;
    done += written;
  }
  return done;
}

}  // namespace

std::size_t write_all(int fd, std::string_view bytes) noexcept {
  return write_each(bytes, [fd](const char* data, std::size_t size, std::size_t) { return ::write(fd, data, size); });
}

std::size_t write_all_at(int fd, std::string_view bytes, std::uint64_t offset) noexcept {
  return write_each(bytes, [fd, offset](const char* data, std::size_t size, std::size_t done) {
    return ::pwrite(fd, data, size, static_cast<off_t>(offset + done));
  });
}

std::size_t send_all(int socket, std::string_view bytes, int flags) noexcept {
  return write_each(bytes, [socket, flags](const char* data, std::size_t size, std::size_t) {
    return ::send(socket, data, size, MSG_NOSIGNAL | flags);
  });
}

}  // namespace maniple
