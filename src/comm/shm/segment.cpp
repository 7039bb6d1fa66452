#include "comm/shm/segment.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"

namespace maniple {

std::shared_ptr<Segment> Segment::create(std::size_t bytes) {
  UniqueFd fd =
      new_descriptor("memfd_create", [] { return ::memfd_create("maniple", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw_system_error(fmt::format("{} bytes of shared memory", bytes));
  }
  // The receiver can rely on the size: a peer cannot shrink the file, which would cause a SIGBUS.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

std::shared_ptr<Segment> Segment::adopt(UniqueFd fd, std::size_t bytes) {
  struct stat facts{};
  if (::fstat(fd.get(), &facts) != 0) throw_system_error("fstat of shared memory");
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (static_cast<std::size_t>(facts.st_size) < bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw ProtocolError(
        fmt::format("shared memory of {} sealed bytes expected, got a file of {}", bytes, facts.st_size));
  }
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

Segment::Segment(UniqueFd fd, std::size_t bytes) : fd_(std::move(fd)), size_(bytes) {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) throw_system_error(fmt::format("mapping {} bytes of shared memory", bytes));
  ::madvise(mapped, bytes, MADV_HUGEPAGE);  // only advice; fails on kernels without huge shared pages
  ::madvise(mapped, bytes, MADV_DONTFORK);  // a child of fork() is not a rank
  data_ = static_cast<std::byte*>(mapped);
}

Segment::~Segment() {
  if (guard_.owned()) ::munmap(data_, size_);  // a child may have another mapping there
}

void Segment::share_with_children() noexcept { ::madvise(data_, size_, MADV_DOFORK); }

void Segment::populate(std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  const int code = ::posix_fallocate(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (code != 0) throw_system_error(fmt::format("{} bytes of shared memory", bytes), code);
}

std::size_t round_to_huge_page(std::size_t bytes) noexcept {
  constexpr std::size_t kHuge = std::size_t{2} << 20;
  return (bytes + kHuge - 1) / kHuge * kHuge;
}

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

ReceivedDescriptor receive_descriptor(int socket, Deadline deadline, int cancel, int longest_poll_ms) {
  for (;;) {
    ReceivedDescriptor result;
    iovec part{&result.about, sizeof result.about};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    // A descriptor that arrives when no number is free is lost, so check first that one is free.
    duplicate(socket).reset();
    const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      pollfd waiting[] = {{socket, POLLIN, 0}, {cancel, POLLIN, 0}};
      const int ready = ::poll(waiting, 2, deadline.poll_ms(longest_poll_ms));
      if (ready == 0 && deadline.expired()) throw Timeout("no shared memory was handed over in time");
      if (waiting[1].revents != 0) throw Aborted("given up while waiting for shared memory");
      continue;
    }
    if (got < 0) throw_system_error("receiving shared memory");
    if (got == 0) throw SystemError("the peer closed the connection before handing over shared memory", ECONNRESET);
    if ((message.msg_flags & MSG_CTRUNC) != 0)
      throw_no_descriptor("receiving shared memory", EMFILE);  // no number was free
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (got != static_cast<ssize_t>(sizeof result.about) || header == nullptr || header->cmsg_type != SCM_RIGHTS) {
      throw ProtocolError("a message without a descriptor where shared memory was expected");
    }
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    result.fd = kept_from_children(UniqueFd(fd));
    return result;
  }
}

}  // namespace maniple
