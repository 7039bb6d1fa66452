// A file descriptor that is closed when its owner goes, and new ones where the limit of open files may be reached.
//
// Descriptors of this process alone (sockets, epoll, memfd, ...: all of new_descriptor) are taken from the children of
// fork(). A child that kept a socket would hide its parent's death from the other ranks, and one that used it would
// speak in the parent's place.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  /// Whoever gets it closes it; children of fork() inherit it.
  int release() noexcept;
  void reset(int fd = -1) noexcept {
    if (fd_ >= 0) ::close(release());
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

/// In children of fork() the descriptor's number stands for a closed socket: the child's copy of the owner stays
/// harmless, and the number is not given to something else that the owner would close.
UniqueFd kept_from_children(UniqueFd fd) noexcept;

// The limit of open files of this process.

/// Raises the soft limit to the hard one.
void raise_descriptor_limit() noexcept;

struct DescriptorUse {
  std::uint64_t open = 0;
  std::uint64_t limit = 0;
};
DescriptorUse descriptor_use() noexcept;

/// For the error after raising did not help: "1024 descriptors are open and the limit is 1024; ...".
std::string descriptor_shortage(std::uint64_t needed_more = 1);

/// SystemError; of EMFILE with the number of open descriptors and what to do.
[[noreturn]] void throw_no_descriptor(const std::string& purpose, int code);

/// The descriptor that `make` returns (a call such as ::socket: -1 and errno if there is none). When descriptors run
/// out the soft limit is raised, once; every descriptor of a rank is made by this or the next, as any may be the one
/// that is too many.
template <class Make>
UniqueFd try_new_descriptor(Make make) {
  UniqueFd fd(make());
  if (!fd && errno == EMFILE) {
    raise_descriptor_limit();  // whether or not it does: another thread may just have
    fd.reset(make());
  }
  return fd;
}
/// The same, kept from children of fork(); throws SystemError, which says `purpose`, where there is none.
template <class Make>
UniqueFd new_descriptor(const std::string& purpose, Make make) {
  UniqueFd fd = try_new_descriptor(std::move(make));
  if (!fd) throw_no_descriptor(purpose, errno);
  return kept_from_children(std::move(fd));
}

/// open(2), by try_new_descriptor: children of fork() inherit it. None, and errno, where there is none.
UniqueFd open_file(const std::string& path, int flags, unsigned mode = 0);

UniqueFd new_event();  // an eventfd, not blocking
UniqueFd duplicate(int fd);

}  // namespace maniple
