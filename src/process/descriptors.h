// Descriptors that spawned processes inherit: never one of the standard three, close-on-exec until a child asks for
// them.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>

#include "base/system_error.h"
#include "base/unique_fd.h"

namespace maniple::launch {

inline UniqueFd above_standard(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return UniqueFd(fd);
  const UniqueFd low(fd);
  UniqueFd high(::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!high) throw_system_error("spawn: duplicating a descriptor");
  return high;
}

/// Reading end, writing end.
inline std::pair<UniqueFd, UniqueFd> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_system_error("spawn: pipe");
  UniqueFd reading(ends[0]);
  UniqueFd writing(ends[1]);
  reading = above_standard(reading.release());
  writing = above_standard(writing.release());
  return {std::move(reading), std::move(writing)};
}

/// Two ends; writing to one whose other end is gone can be done without a signal (send with MSG_NOSIGNAL).
inline std::pair<UniqueFd, UniqueFd> make_socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw_system_error("spawn: socketpair");
  UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  ours = above_standard(ours.release());
  theirs = above_standard(theirs.release());
  return {std::move(ours), std::move(theirs)};
}

/// A file without a name that holds `bytes`, which nobody can change any more.
inline UniqueFd sealed_memory(const char* name, std::string_view bytes) {
  UniqueFd file = above_standard(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_system_error("spawn: memfd_create");
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t wrote = ::write(file.get(), bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0)
      throw_system_error("spawn: writing " + std::to_string(bytes.size()) + " bytes for the new processes");
    done += static_cast<std::size_t>(wrote);
  }
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0)
    throw_system_error("spawn: sealing memory");
  return file;
}

}  // namespace maniple::launch
