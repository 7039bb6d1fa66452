// An owned file descriptor, and functions that create descriptors even when the soft limit of open files is reached.
//
// Descriptors private to this process (sockets, epoll, memfd: everything from new_descriptor) are not passed on to
// children of fork(). A child that kept a socket would hide its parent's death from the other ranks, and a child that
// used it would impersonate its parent.
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
  /// The caller closes the descriptor; children of fork() inherit it.
  int release() noexcept;
  void reset(int fd = -1) noexcept {
    if (fd_ >= 0) ::close(release());
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

/// In children of fork() the descriptor's number refers to a closed socket. The child's copy of the owner stays
/// harmless, and the number is not reused for another file that the owner would then close.
UniqueFd kept_from_children(UniqueFd fd) noexcept;

// This process's limit of open files.

/// Raises the soft limit to the hard one.
void raise_descriptor_limit() noexcept;

struct DescriptorUse {
  std::uint64_t open = 0;
  std::uint64_t limit = 0;
};
DescriptorUse descriptor_use() noexcept;

/// Error text for when raising the limit did not help: "1024 file descriptors are open, 1 more needed, but the limit is
/// 1024; ...".
std::string descriptor_shortage(std::uint64_t needed_more = 1);

/// Throws SystemError; for EMFILE the text has the number of open descriptors and what to do.
[[noreturn]] void throw_no_descriptor(const std::string& purpose, int code);

/// Returns the descriptor made by `make` (a call such as ::socket, which returns -1 and sets errno on failure). When
/// descriptors run out, raises the soft limit and tries once more. Every descriptor of a rank is made by this function
/// or new_descriptor, because any of them may be the one that exceeds the limit.
template <class Make>
UniqueFd try_new_descriptor(Make make) {
  UniqueFd fd(make());
  if (!fd && errno == EMFILE) {
    raise_descriptor_limit();  // retry even if this fails: another thread may have raised it
    fd.reset(make());
  }
  return fd;
}
/// Like try_new_descriptor, but hidden from children of fork(). On failure throws SystemError, whose text names
/// `purpose`.
template <class Make>
UniqueFd new_descriptor(const std::string& purpose, Make make) {
  UniqueFd fd = try_new_descriptor(std::move(make));
  if (!fd) throw_no_descriptor(purpose, errno);
  return kept_from_children(std::move(fd));
}

/// open(2) through try_new_descriptor: children of fork() inherit the descriptor. On failure the result is empty and
/// errno is set.
UniqueFd open_file(const std::string& path, int flags, unsigned mode = 0);

UniqueFd new_event();  // a non-blocking eventfd
UniqueFd duplicate(int fd);

}  // namespace maniple
