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
  notices_.clear();
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

namespace {

/// The numbers of "STAGE 3 1 4"; empty if the message is not of that stage.
std::vector<std::int64_t> numbers_after(std::string_view stage, std::string_view message) {
  std::vector<std::int64_t> numbers;
  if (!message.starts_with(stage)) return numbers;
  const char* next = message.data() + stage.size();
  const char* const end = message.data() + message.size();
  while (next != end) {
    if (*next++ != ' ') return {};
    std::int64_t number = -1;
    const auto [rest, error] = std::from_chars(next, end, number);
    if (error != std::errc() || number < 0) return {};
    numbers.push_back(number);
    next = rest;
  }
  return numbers;
}

}  // namespace

void WorkerMessages::take(std::string_view message) {
  using Kind = WorkerNotice::Kind;
  if (const auto numbers = numbers_after("joining", message); numbers.size() == 1) {
    const int rank = static_cast<int>(numbers[0]);
    waiting_.insert(rank);
    notices_.push_back({.kind = Kind::ready, .rank = rank});
  } else if (const auto joined = numbers_after("joined", message); joined.size() == 1) {
    const int rank = static_cast<int>(joined[0]);
    waiting_.erase(rank);
    initialised_.insert(rank);
    failures_.erase(rank);  // it goes on with another group
    reporters_.erase(rank);
    notices_.push_back({.kind = Kind::joined, .rank = rank});
  } else if (const auto leaving = numbers_after("leaving", message); leaving.size() == 1) {
    notices_.push_back({.kind = Kind::leaving, .rank = static_cast<int>(leaving[0])});
  } else if (const auto lost = numbers_after("lost", message); lost.size() >= 2) {
    notices_.push_back({.kind = Kind::lost,
                        .rank = static_cast<int>(lost[0]),
                        .generation = static_cast<std::uint32_t>(lost[1]),
                        .lost = {lost.begin() + 2, lost.end()}});
  } else {
    try {
      FailureReport report = decode_report(message);
      take_failure(report.rank, std::move(report.error));
    } catch (const ProtocolError& error) {
      log_debug("a message of a worker: {}", error.what());
    }
  }
}

void WorkerMessages::forget(int rank) {
  waiting_.erase(rank);
  initialised_.erase(rank);
  failures_.erase(rank);
  reporters_.erase(rank);
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
