#include "process/init_notices.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>

#include "base/system_error.h"
#include "process/descriptors.h"

namespace maniple::launch {

void InitNotices::open() {
  close();
  joining_.clear();
  joined_.clear();
  int ends[2];
  // Each notice is a packet of its own, however many ranks share the socket.
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) throw_system_error("socketpair");
  own_end_.reset(ends[0]);
  rank_end_ = above_standard(ends[1]);
  ::fcntl(own_end_.get(), F_SETFL, O_NONBLOCK);
}

void InitNotices::close() noexcept {
  own_end_.reset();
  rank_end_.reset();
}

bool InitNotices::read() {
  char text[64];
  while (own_end_) {
    const ssize_t got = ::recv(own_end_.get(), text, sizeof text, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    if (got == 0) return false;
    take(std::string_view(text, static_cast<std::size_t>(got)));
  }
  return false;
}

void InitNotices::take(std::string_view notice) {
  const auto blank = notice.find(' ');
  if (blank == std::string_view::npos) return;
  const std::string_view stage = notice.substr(0, blank), number = notice.substr(blank + 1);
  int rank = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), rank);
  if (error != std::errc() || end != number.data() + number.size() || rank < 0) return;
  if (stage == "joining") joining_.insert(rank);
  if (stage == "joined") {
    joining_.erase(rank);
    joined_.insert(rank);
  }
}

std::optional<int> InitNotices::waiting() const {
  if (joining_.empty()) return std::nullopt;
  return *joining_.begin();
}

}  // namespace maniple::launch
