// One of the launcher's own outputs, written without blocking: a reader that pauses must not keep the launcher from
// noticing that a rank died. Bytes that cannot be written yet wait in a buffer. Callers check `congested` before
// appending, so the buffer stays small and workers are slowed down by their own full pipes.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "comm/base/unique_fd.h"
#include "comm/net/poller.h"

namespace maniple::launch {

class OutputStream {
 public:
  OutputStream(Poller& poller, int fd);
  ~OutputStream();
  OutputStream(const OutputStream&) = delete;
  OutputStream& operator=(const OutputStream&) = delete;

  void append(std::string_view bytes) { buffer_.append(bytes); }
  void append(char byte) { buffer_.push_back(byte); }
  /// Writes as much as the reader accepts now.
  void flush();

  bool congested() const noexcept { return buffer_.size() - done_ > kMost; }
  bool empty() const noexcept { return done_ == buffer_.size(); }
  bool broken() const noexcept { return broken_; }  ///< the reader is gone
  bool terminal() const noexcept { return terminal_; }

  /// Called when the stream is no longer congested.
  std::function<void()> on_relief;

 private:
  enum class Way { direct, non_blocking, careful };
  bool write_some();
  void wait_for_room(bool wanted);

  static constexpr std::size_t kMost = std::size_t{256} << 10;

  Poller& poller_;
  int fd_;
  UniqueFd own_;  // a separate open file description, so that O_NONBLOCK does not affect others who share the pipe
  Way way_ = Way::careful;
  bool terminal_ = false;
  bool broken_ = false;
  bool watched_ = false;
  std::string buffer_;
  std::size_t done_ = 0;
};

}  // namespace maniple::launch
