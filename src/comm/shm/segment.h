// Memory that several processes map: an anonymous file (memfd). It lacks a name that could be left behind, and
// disappears with its last user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/base/fork_guard.h"
#include "comm/base/unique_fd.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class Segment {
 public:
  /// Creates a segment. Pages are allocated, zeroed, at first touch.
  static std::shared_ptr<Segment> create(std::size_t bytes);
  /// Maps a segment that another process created. Throws ProtocolError if the file is smaller than `bytes` or not
  /// sealed against shrinking.
  static std::shared_ptr<Segment> adopt(UniqueFd fd, std::size_t bytes);

  ~Segment();  ///< in a child of fork() it does nothing
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  int fd() const noexcept { return fd_.get(); }
  /// From now on, children of fork() share the memory. Otherwise they do not have the mapping.
  void share_with_children() noexcept;
  void close_fd() noexcept { fd_.reset(); }  ///< the mapping stays

  /// Allocates the pages of a range now, so that a lack of memory is an error here instead of a SIGBUS later.
  void populate(std::size_t offset, std::size_t bytes);

 private:
  Segment(UniqueFd fd, std::size_t bytes);
  ForkGuard guard_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Rounds up to whole huge pages (2 MiB), so that huge pages can be used if the system provides them.
std::size_t round_to_huge_page(std::size_t bytes) noexcept;

// Passing a descriptor to another process over a Unix socket.

/// Sends one message: the descriptor and eight bytes about it. Does not block, because the socket's buffer is empty at
/// that point.
void send_descriptor(int socket, int fd, std::uint64_t about);

struct ReceivedDescriptor {
  UniqueFd fd;
  std::uint64_t about = 0;
};
/// Throws Timeout; SystemError (ECONNRESET) if the peer closes the connection first; ProtocolError if the message has
/// no descriptor; Aborted as soon as `cancel` (a descriptor; -1: none) is readable. Polls again after at most
/// `longest_poll_ms`, even if the deadline is later.
ReceivedDescriptor receive_descriptor(int socket, Deadline deadline, int cancel = -1, int longest_poll_ms = 1'000'000);

}  // namespace maniple
