#include "store/tcp_store_client.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/codec.h"
#include "base/system_error.h"

namespace maniple {
namespace {

// For requests that the server answers at once, and for asking what is missing after a deadline.
constexpr std::chrono::seconds kPlainLimit{120};
constexpr std::chrono::milliseconds kReportLimit{500};

std::string head_with_key(std::string_view key) {
  require_key(key);
  ByteWriter writer;
  writer.put_string(key);
  return writer.take();
}

std::int64_t number_in(std::string_view body) {
  ByteReader reader(body);
  const auto number = reader.get<std::int64_t>();
  reader.expect_end();
  return number;
}

double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

}  // namespace

TcpStoreClient::TcpStoreClient(UniqueFd fd, Address server, std::shared_ptr<void> keep)
    : server_(server), fd_(std::move(fd)), keep_(std::move(keep)) {}

std::string TcpStoreClient::describe() const { return "tcp store at " + server_.to_string(); }

// --- the operations ---

void TcpStoreClient::set(std::string_view key, std::string_view value) {
  require_value(value);
  call_now(StoreOp::set, head_with_key(key), value);
}

std::string TcpStoreClient::get(std::string_view key, Deadline deadline) {
  const std::string owned(key);
  return std::move(multi_get(std::span(&owned, 1), deadline).front());
}

std::vector<std::string> TcpStoreClient::multi_get(std::span<const std::string> keys, Deadline deadline) {
  return decode_values(await_keys(StoreOp::multi_get, keys, deadline), keys.size());
}

void TcpStoreClient::wait(std::span<const std::string> keys, Deadline deadline) {
  await_keys(StoreOp::wait, keys, deadline);
}

std::vector<bool> TcpStoreClient::check(std::span<const std::string> keys) {
  auto flags = try_check(keys, Deadline::after(kPlainLimit));
  if (!flags) throw Timeout(fmt::format("{}: no answer to check within {} s", describe(), kPlainLimit.count()));
  return *flags;
}

std::optional<std::vector<bool>> TcpStoreClient::try_check(std::span<const std::string> keys, Deadline deadline) {
  require_keys(keys);
  const auto body = call(StoreOp::check, encode_keys(keys), {}, deadline);
  if (!body) return std::nullopt;
  return decode_flags(*body, keys.size());
}

std::int64_t TcpStoreClient::add(std::string_view key, std::int64_t delta) {
  ByteWriter number;
  number.put(delta);
  return number_in(call_now(StoreOp::add, head_with_key(key), number.bytes()));
}

std::string TcpStoreClient::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  require_value(expected);
  require_value(desired);
  ByteWriter head;
  head.put_raw(head_with_key(key));
  head.put_string(expected);
  return call_now(StoreOp::compare_set, head.bytes(), desired);
}

bool TcpStoreClient::erase(std::string_view key) {
  return call_now(StoreOp::erase, head_with_key(key)) != std::string(1, '\0');
}

std::int64_t TcpStoreClient::num_keys() { return number_in(call_now(StoreOp::num_keys, {})); }

// --- one call ---

std::string TcpStoreClient::call_now(StoreOp op, std::string_view head, std::string_view tail) {
  auto body = call(op, head, tail, Deadline::after(kPlainLimit));
  if (!body)
    throw Timeout(
        fmt::format("{}: no answer within {} s; its process may be stopped", describe(), kPlainLimit.count()));
  return std::move(*body);
}

std::string TcpStoreClient::await_keys(StoreOp op, std::span<const std::string> keys, Deadline deadline) {
  require_keys(keys);
  const std::string head = encode_keys(keys);
  MANIPLE_REQUIRE(head.size() <= kMaxKeyListBytes,
                  "{} keys have {} bytes together; at most {} are allowed in one request", keys.size(), head.size(),
                  kMaxKeyListBytes);
  const auto start = Deadline::Clock::now();
  if (auto body = call(op, head, {}, deadline)) return std::move(*body);
  const double waited = seconds_since(start);
  const auto present = try_check(keys, Deadline::after(kReportLimit));
  if (!present)
    throw Timeout(
        fmt::format("{}: waited {:.1f} s for {} keys; the server does not answer", describe(), waited, keys.size()));
  if (std::find(present->begin(), present->end(), false) == present->end()) {
    // They are there, only the deadline was shorter than the way to the server.
    if (auto body = call(op, head, {}, Deadline::after(kReportLimit))) return std::move(*body);
  }
  throw Timeout(fmt::format("{}: {}", describe(), missing_keys_text(keys, *present, waited)));
}

std::optional<std::string> TcpStoreClient::call(StoreOp op, std::string_view head, std::string_view tail,
                                                Deadline deadline) {
  // The connection is the parent's: what a child wrote there, or took, would be missing from the parent's own.
  if (fork_generation() != generation_) {
    throw Aborted(describe() + ": a child of fork() cannot use its parent's store; open one of its own");
  }
  Call waiting;
  std::uint32_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!lost_.empty()) throw_lost(lost_);
    do {
      id = next_id_++;
    } while (calls_.count(id) != 0);
    calls_.emplace(id, &waiting);
  }
  std::optional<Frame> reply;
  try {
    send_frame(id, op, head, tail, deadline);
    reply = await_reply(id, waiting, deadline);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    calls_.erase(id);
    throw;
  }
  if (!reply) {
    if (op == StoreOp::multi_get || op == StoreOp::wait)
      send_frame(id, StoreOp::cancel, {}, {}, Deadline::after(kReportLimit));
    return std::nullopt;
  }
  if (reply->code == static_cast<std::uint8_t>(StoreStatus::ok)) return std::move(reply->body);
  const std::string text = fmt::format("{}: {}", describe(), reply->body);
  if (reply->code == static_cast<std::uint8_t>(StoreStatus::invalid)) throw InvalidArgument(text);
  throw ProtocolError(text);
}

void TcpStoreClient::throw_lost(const std::string& reason) const {
  throw PeerLost(
      fmt::format("{}: connection lost ({}): the process that serves it, rank 0 or the launcher, has ended or "
                  "cannot be reached",
                  describe(), reason),
      -1);
}

// --- writing ---

void TcpStoreClient::send_frame(std::uint32_t id, StoreOp op, std::string_view head, std::string_view tail,
                                Deadline deadline) {
  const std::lock_guard sending(send_mutex_);
  const std::string header = encode_frame_header(id, static_cast<std::uint8_t>(op), head.size() + tail.size());
  // iovec has no const; sendmsg does not write.
  const auto part = [](std::string_view bytes) { return iovec{const_cast<char*>(bytes.data()), bytes.size()}; };
  iovec parts[] = {part(header), part(head), part(tail)};
  std::size_t first = 0;
  bool begun = false;
  while (first < std::size(parts)) {
    msghdr message{};
    message.msg_iov = parts + first;
    message.msg_iovlen = std::size(parts) - first;
    ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) {
      try {
        await_room(deadline);
      } catch (const Timeout&) {
        // Half a frame cannot be taken back: what follows it would be read as its rest.
        if (begun) {
          const std::lock_guard lock(mutex_);
          if (lost_.empty()) lost_ = "given up in the middle of a request, as its deadline passed";
          changed_.notify_all();
        }
        throw;
      }
      continue;
    }
    if (sent < 0) {
      const std::lock_guard lock(mutex_);
      if (lost_.empty()) lost_ = errno_text(errno);
      changed_.notify_all();
      throw_lost(lost_);
    }
    begun = true;
    while (first < std::size(parts) && static_cast<std::size_t>(sent) >= parts[first].iov_len) {
      sent -= static_cast<ssize_t>(parts[first].iov_len);
      ++first;
    }
    if (first < std::size(parts)) {
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + sent;
      parts[first].iov_len -= static_cast<std::size_t>(sent);
    }
  }
}

/// The server stops reading from a client that does not read: so while the socket is full, replies are taken in.
void TcpStoreClient::await_room(Deadline deadline) {
  constexpr int kLookAgainMs = 50;
  std::unique_lock lock(mutex_);
  if (!lost_.empty()) throw_lost(lost_);
  const bool lead = !reading_;
  if (lead) reading_ = true;
  lock.unlock();
  pollfd waiting{.fd = fd_.get(), .events = static_cast<short>(lead ? POLLIN | POLLOUT : POLLOUT), .revents = 0};
  const int limit = deadline.is_never() ? kLookAgainMs : deadline.poll_ms(kLookAgainMs);
  ::poll(&waiting, 1, limit);
  if (lead) {
    if ((waiting.revents & POLLIN) != 0) read_available();
    lock.lock();
    reading_ = false;
    changed_.notify_all();
    lock.unlock();
  }
  if ((waiting.revents & (POLLOUT | POLLERR | POLLHUP)) == 0 && deadline.expired()) {
    throw Timeout(fmt::format("{}: the server took no more of a request before its deadline", describe()));
  }
}

// --- reading ---

std::optional<Frame> TcpStoreClient::await_reply(std::uint32_t id, Call& call, Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (call.reply) {
      calls_.erase(id);
      return std::move(call.reply);
    }
    if (!lost_.empty()) throw_lost(lost_);
    if (deadline.expired()) {
      calls_.erase(id);
      return std::nullopt;
    }
    if (!reading_) {
      read_as_leader(lock, deadline);
    } else if (deadline.is_never()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, deadline.when());
    }
  }
}

void TcpStoreClient::read_as_leader(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  reading_ = true;
  lock.unlock();
  pollfd waiting{.fd = fd_.get(), .events = POLLIN, .revents = 0};
  if (::poll(&waiting, 1, deadline.poll_ms()) > 0) read_available();
  lock.lock();
  reading_ = false;
  changed_.notify_all();  // somebody else may have to lead now
}

/// Only by the thread that has set `reading_`.
void TcpStoreClient::read_available() {
  std::string failure;
  std::vector<Frame> frames;
  for (;;) {
    const ssize_t got = ::recv(fd_.get(), buffer_.data(), buffer_.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got <= 0) {
      failure = got == 0 ? "closed by the server" : errno_text(errno);
      break;
    }
    std::string_view bytes(buffer_.data(), static_cast<std::size_t>(got));
    try {
      while (auto frame = reader_.next(bytes)) frames.push_back(std::move(*frame));
    } catch (const ProtocolError& error) {
      failure = error.what();
      break;
    }
    if (!frames.empty()) break;
  }
  const std::lock_guard lock(mutex_);
  for (Frame& frame : frames) {
    // A reply to nobody is one whose caller gave up.
    if (const auto found = calls_.find(frame.id); found != calls_.end()) found->second->reply = std::move(frame);
  }
  if (!failure.empty() && lost_.empty()) lost_ = failure;
}

}  // namespace maniple
