#include "launch/process/worker_messages.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <tuple>

#include "comm/base/log.h"
#include "launch/process/descriptors.h"
#include "launch/process/failure_report.h"

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
      take_failure(report.rank, std::move(report.error));
    } catch (const ProtocolError& error) {
      log_debug("a message of a worker: {}", error.what());
    }
  }
}

void WorkerMessages::take_failure(int rank, ErrorInfo error) {
  const auto now = std::chrono::steady_clock::now();
  const auto known = failures_.find(rank);
  if (known != failures_.end() && follows_from(known->second.error, error, rank, now - known->second.when)) return;
  failures_[rank] = {.error = std::move(error), .when = now};
  reporters_.insert(rank);
}

std::optional<int> WorkerMessages::waiting() const {
  if (waiting_.empty()) return std::nullopt;
  return *waiting_.begin();
}

const ErrorInfo* WorkerMessages::failure_of(int rank) const {
  const auto found = failures_.find(rank);
  return found == failures_.end() ? nullptr : &found->second.error;
}

}  // namespace maniple::launch
