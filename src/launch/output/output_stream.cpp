#include "launch/output/output_stream.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include <fmt/format.h>

namespace maniple::launch {

OutputStream::OutputStream(Poller& poller, int fd) : poller_(poller), fd_(fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    broken_ = true;
    return;
  }
  terminal_ = ::isatty(fd) == 1;
  if (S_ISFIFO(status.st_mode)) {
    own_.reset(::open(fmt::format("/proc/self/fd/{}", fd).c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
    if (own_) {
      fd_ = own_.get();
      way_ = Way::non_blocking;
    }
  }
  if (poller_.add(fd_, 0, [this](std::uint32_t events) {
        if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) flush();
      })) {
    watched_ = true;
  } else {
    way_ = Way::direct;  // a file is always ready
  }
}

OutputStream::~OutputStream() {
  if (watched_) poller_.remove(fd_);
}

/// Returns false when no more can be written now.
bool OutputStream::write_some() {
  std::size_t count = buffer_.size() - done_;
  if (way_ == Way::careful) {
    // POLLOUT guarantees room for PIPE_BUF bytes; a longer write might block.
    pollfd state{.fd = fd_, .events = POLLOUT, .revents = 0};
    if (::poll(&state, 1, 0) <= 0) return false;
    count = std::min<std::size_t>(count, PIPE_BUF);
  }
  const ssize_t wrote = ::write(fd_, buffer_.data() + done_, count);
  if (wrote < 0 && errno == EINTR) return true;
  if (wrote < 0 && errno == EAGAIN) return false;
  if (wrote < 0) {
    broken_ = true;
    return false;
  }
  done_ += static_cast<std::size_t>(wrote);
  return true;
}

void OutputStream::flush() {
  const bool was_congested = congested();
  while (!broken_ && !empty() && write_some()) {
  }
  if (broken_) done_ = buffer_.size();
  if (empty()) {
    buffer_.clear();
    done_ = 0;
  } else if (done_ > kMost) {
    buffer_.erase(0, done_);
    done_ = 0;
  }
  wait_for_room(!empty());
  if (was_congested && !congested() && on_relief) on_relief();
}

void OutputStream::wait_for_room(bool wanted) {
  if (!watched_) return;
  if (broken_) {
    poller_.remove(fd_);
    watched_ = false;
    return;
  }
  poller_.modify(fd_, wanted ? EPOLLOUT : 0u);
}

}  // namespace maniple::launch
