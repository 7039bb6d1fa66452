#include "shm/descriptor_passing.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/system_error.h"

namespace maniple {

void send_descriptor(int socket, int fd, std::uint64_t about) {
  iovec part{&about, sizeof about};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof about)) {
    throw_system_error("handing over shared memory");
  }
}

ReceivedDescriptor receive_descriptor(int socket, Deadline deadline, int cancel) {
  for (;;) {
    ReceivedDescriptor result;
    iovec part{&result.about, sizeof result.about};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      pollfd waiting[] = {{socket, POLLIN, 0}, {cancel, POLLIN, 0}};
      if (::poll(waiting, 2, deadline.poll_ms()) == 0) throw Timeout("no shared memory was handed over in time");
      if (waiting[1].revents != 0) throw Aborted("given up while waiting for shared memory");
      continue;
    }
    if (got < 0) throw_system_error("receiving shared memory");
    if (got == 0) throw SystemError("the peer closed the connection before handing over shared memory", ECONNRESET);
    if ((message.msg_flags & MSG_CTRUNC) != 0)
      throw_system_error("receiving shared memory", EMFILE);  // no number was free
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (got != static_cast<ssize_t>(sizeof result.about) || header == nullptr || header->cmsg_type != SCM_RIGHTS) {
      throw ProtocolError("a message without a descriptor where shared memory was expected");
    }
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    result.fd.reset(fd);
    return result;
  }
}

}  // namespace maniple
