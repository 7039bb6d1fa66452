#include "launch/process/worker_messages.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <tuple>

#include "comm/base/log.h"
#include "launch/process/descriptors.h"

namespace maniple::launch {

void WorkerMessages::open() {
  close();
  waiting_.clear();
  initialised_.clear();
  failures_.clear();
  reporters_.clear();
  // A packet socket keeps messages apart although many ranks share it.
  std::tie(own_end_, rank_end_) = make_socket_pair(SOCK_SEQPACKET);
  ::fcntl(own_end_.get(), F_SETFL, O_NONBLOCK);
}

void WorkerMessages::close() noexcept {
  own_end_.reset();
  rank_end_.reset();
}

bool WorkerMessages::receive() {
  std::array<char, kMaxReportBytes> bytes;
  while (own_end_) {
    const ssize_t got = ::recv(own_end_.get(), bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    if (got == 0) return false;
    take({bytes.data(), static_cast<std::size_t>(got)});
  }
  return false;
}

void WorkerMessages::take(std::string_view message) {
  const auto number_after = [&](std::string_view stage) {
    int rank = -1;
    if (message.starts_with(stage)) {
      const std::string_view number = message.substr(stage.size());
      const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), rank);
      if (error != std::errc() || end != number.data() + number.size()) rank = -1;
    }
    return rank;
  };
  if (const int rank = number_after("joining "); rank >= 0) {
    waiting_.insert(rank);
  } else if (const int joined = number_after("joined "); joined >= 0) {
    waiting_.erase(joined);
    initialised_.insert(joined);
  } else {
    try {
      FailureReport report = decode_report(message);
      reporters_.insert(report.rank);
      failures_[report.rank] = std::move(report.error);
    } catch (const ProtocolError& error) {
      log_debug("a message of a worker: {}", error.what());
    }
  }
}

std::optional<int> WorkerMessages::waiting() const {
  if (waiting_.empty()) return std::nullopt;
  return *waiting_.begin();
}

const ErrorInfo* WorkerMessages::failure_of(int rank) const {
  const auto found = failures_.find(rank);
  return found == failures_.end() ? nullptr : &found->second;
}

}  // namespace maniple::launch
