#include "launch/process/descriptors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include <fmt/format.h>

#include "comm/base/system_error.h"
#include "comm/base/write_all.h"
#include "comm/net/address.h"

namespace maniple::launch {

UniqueFd above_standard(UniqueFd fd) {
  if (!fd || fd.get() > STDERR_FILENO) return fd;
  UniqueFd moved(::fcntl(fd.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!moved) throw_system_error("duplicating a descriptor for a process to start");
  return moved;
}

std::pair<UniqueFd, UniqueFd> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_system_error("pipe to a process to start");
  UniqueFd reading(ends[0]), writing(ends[1]);
  return {above_standard(std::move(reading)), above_standard(std::move(writing))};
}

std::pair<UniqueFd, UniqueFd> make_socket_pair(int type) {
  int ends[2];
  if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends) != 0) throw_system_error("socketpair to a process to start");
  UniqueFd ours(ends[0]), theirs(ends[1]);
  return {above_standard(std::move(ours)), above_standard(std::move(theirs))};
}

UniqueFd sealed_memory(const char* name, std::string_view bytes) {
  UniqueFd file = above_standard(UniqueFd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!file) throw_system_error("memfd_create");
  if (write_all(file.get(), bytes) != bytes.size())
    throw_system_error(fmt::format("writing {} bytes for the new processes", bytes.size()));
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0)
    throw_system_error("sealing memory");
  return file;
}

UniqueFd reserve_port(const Address& address) {
  UniqueFd fd = above_standard(UniqueFd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0)));
  if (!fd) throw_system_error("a socket for rank 0");
  const int on = 1;
  // A requested port may be left over from an earlier job. For port 0 the option is set after bind(), so that the
  // kernel does not return a port that another process has reserved in this way.
  if (address.port() != 0) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), address.get(), address.length()) != 0) {
    const int code = errno;
    std::string text = fmt::format("rank 0 cannot listen on {}: {}", address.to_string(), errno_text(code));
    if (code == EADDRINUSE) {
      if (const auto holder = describe_port_holder(address.port())) text += fmt::format("; it is held by {}", *holder);
      text += "; choose another --master port, or 0 for any free one";
    }
    throw SystemError(text, code);
  }
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  return fd;
}

}  // namespace maniple::launch
