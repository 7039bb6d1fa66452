// One direction of bytes between two ranks, non-blocking: a TCP connection or a ring in shared memory.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <string>

#include <maniple/comm/error.h>

namespace maniple {

/// What a channel throws whose other end was destroyed by its rank, in good order.
[[noreturn]] inline void throw_left(const std::string& reason, int code) {
  ErrorInfo info;
  info.loss = LossKind::left;
  info.code = code;
  info.reason = reason;
  throw SystemError(std::move(info));
}

/// Both return the number of bytes moved, 0 when nothing can move now. Both throw PeerLost-worthy conditions as
/// SystemError (reset, end of stream; throw_left); who the peer is, the caller knows and adds.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  virtual std::size_t write_some(std::span<const iovec> parts) = 0;
  virtual int fd() const noexcept = 0;      ///< to poll for EPOLLOUT; -1: none (shared memory)
  virtual std::size_t room() { return 0; }  ///< what write_some takes now, whole; 0: unknown
  /// What fits between the two ends while nothing is read, at least.
  virtual std::size_t capacity() const noexcept { return std::size_t{256} << 10; }
  virtual bool authenticates() const noexcept { return false; }  ///< the other end refuses bytes that were changed
  virtual bool wants_checksums() const noexcept {
    return true;
  }  ///< of payloads, unless it authenticates or is shared memory
};

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual std::size_t read_some(std::span<const iovec> parts) = 0;
  virtual int fd() const noexcept = 0;       ///< to poll for EPOLLIN; -1: none (shared memory)
  virtual std::size_t ready() { return 0; }  ///< what read_some gives now, in one call; 0: unknown
  virtual bool holds_bytes() const noexcept {
    return false;
  }  ///< there may be some although the descriptor is not readable
};

}  // namespace maniple
