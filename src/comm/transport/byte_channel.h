// A non-blocking, one-way byte channel between two ranks: a TCP connection or a ring in shared memory.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <string>

#include <maniple/comm/error.h>

namespace maniple {

/// Throws the error of a channel whose other end was closed in good order by its rank.
[[noreturn]] inline void throw_left(const std::string& reason, int code) {
  ErrorInfo info;
  info.loss = LossKind::left;
  info.code = code;
  info.reason = reason;
  throw SystemError(std::move(info));
}

/// `write_some` and `read_some` return the number of bytes moved, 0 when nothing can move now. Both throw SystemError
/// when the connection is lost (reset, end of stream; throw_left). The caller makes that a PeerLost, as it knows the
/// peer.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  virtual std::size_t write_some(std::span<const iovec> parts) = 0;
  virtual int fd() const noexcept = 0;      ///< to poll for EPOLLOUT; -1: none (shared memory)
  virtual std::size_t room() { return 0; }  ///< bytes that one write_some would take now; 0: unknown
  /// Lower bound of the bytes that fit between the two ends while nothing is read.
  virtual std::size_t capacity() const noexcept { return std::size_t{256} << 10; }
  virtual bool authenticates() const noexcept { return false; }  ///< the other end rejects modified bytes
  /// Whether payloads need checksums; false if the channel authenticates or is shared memory.
  virtual bool wants_checksums() const noexcept { return true; }
};

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual std::size_t read_some(std::span<const iovec> parts) = 0;
  virtual int fd() const noexcept = 0;       ///< to poll for EPOLLIN; -1: none (shared memory)
  virtual std::size_t ready() { return 0; }  ///< bytes that one read_some would return now; 0: unknown
  /// Whether bytes may be buffered although the descriptor is not readable.
  virtual bool holds_bytes() const noexcept { return false; }
};

}  // namespace maniple
