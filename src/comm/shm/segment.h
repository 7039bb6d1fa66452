// A piece of memory that several processes map: an anonymous file (memfd), which has no name to leak and is gone with
// its last user.
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
  /// Makes one. Pages appear, zeroed, when first touched.
  static std::shared_ptr<Segment> create(std::size_t bytes);
  /// Maps one that another process made. Throws ProtocolError if the file is smaller than `bytes`.
  static std::shared_ptr<Segment> adopt(UniqueFd fd, std::size_t bytes);

  ~Segment();  ///< in a child of fork() it does nothing
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  int fd() const noexcept { return fd_.get(); }
  /// Children of fork() see the memory from now on, and share it. Without this they have no mapping there.
  void share_with_children() noexcept;
  void close_fd() noexcept { fd_.reset(); }  ///< the mapping stays

  /// Gets the pages of a range now, so that a lack of memory is an error here and not a SIGBUS later.
  void populate(std::size_t offset, std::size_t bytes);

 private:
  Segment(UniqueFd fd, std::size_t bytes);
  ForkGuard guard_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Rounds up to whole pages of the largest kind we map (2 MiB), so that huge pages can be used where the system gives
/// them.
std::size_t round_to_huge_page(std::size_t bytes) noexcept;

// Handing an open file to another process over a Unix socket.

/// One message: the descriptor and eight bytes about it. The socket's buffer is empty at that point, so this does not
/// block.
void send_descriptor(int socket, int fd, std::uint64_t about);

struct ReceivedDescriptor {
  UniqueFd fd;
  std::uint64_t about = 0;
};
/// Throws Timeout, PeerLost-worthy SystemError at end of stream, ProtocolError when the message holds no descriptor,
/// Aborted as soon as `cancel` (a descriptor; -1: none) is readable. Looks again after `longest_poll_ms`, however far
/// the deadline is.
ReceivedDescriptor receive_descriptor(int socket, Deadline deadline, int cancel = -1, int longest_poll_ms = 1'000'000);

}  // namespace maniple
