#include "comm/store/tcp_store.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "comm/base/environment.h"
#include "comm/base/system_error.h"

namespace maniple {
namespace {

// Limits of requests that the server replies to at once, and of the query for missing keys after a deadline.
constexpr std::chrono::seconds kPlainLimit{120};
constexpr std::chrono::milliseconds kReportLimit{500};
constexpr std::chrono::seconds kLastRequests{2};

constexpr std::size_t kRecordsAtOnce = 4;  // records of a large value per system call

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

TcpStoreClient::TcpStoreClient(SecureConnection connection, Address server, std::shared_ptr<void> keep)
    : server_(server), stream_(std::move(connection), kStoreReplies, kRecordsAtOnce), keep_(std::move(keep)) {}

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
  const auto start = Deadline::Clock::now();
  auto flags = try_check(keys, request_limit());
  if (!flags) {
    throw Timeout(fmt::format("{}: no answer to check within {:.1f} s", describe(), seconds_since(start)), {},
                  seconds_since(start));
  }
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

void TcpStoreClient::limit_requests(Deadline limit) {
  const MutexLock lock(mutex_);
  request_limit_ = limit;
}

Deadline TcpStoreClient::request_limit() {
  const MutexLock lock(mutex_);
  // After a timeout, a caller still withdraws what it has set, and queries which keys are missing.
  return Deadline::sooner(std::max(request_limit_, Deadline::after(kLastRequests)), Deadline::after(kPlainLimit));
}

std::string TcpStoreClient::call_now(StoreOp op, std::string_view head, std::string_view tail) {
  const auto start = Deadline::Clock::now();
  auto body = call(op, head, tail, request_limit());
  if (!body) {
    const double waited = seconds_since(start);
    throw Timeout(fmt::format("{}: no answer within {:.1f} s; its process may be stopped", describe(), waited), {},
                  waited);
  }
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
        fmt::format("{}: waited {:.1f} s for {} keys; the server does not answer", describe(), waited, keys.size()), {},
        waited);
  if (std::find(present->begin(), present->end(), false) == present->end()) {
    // The keys exist; the deadline was just shorter than the round trip to the server.
    if (auto body = call(op, head, {}, Deadline::after(kReportLimit))) return std::move(*body);
  }
  throw Timeout(fmt::format("{}: {}", describe(), missing_keys_text(keys, *present, waited)), {}, waited);
}

std::optional<std::string> TcpStoreClient::call(StoreOp op, std::string_view head, std::string_view tail,
                                                Deadline deadline) {
  require_owned(guard_, describe());
  Call waiting;
  std::uint32_t id = 0;
  {
    const MutexLock lock(mutex_);
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
    const MutexLock lock(mutex_);
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
  if (forged_) throw ProtocolError(fmt::format("{}: connection closed: it brought {}", describe(), reason));
  throw PeerLost(
      fmt::format("{}: connection lost ({}): the process that serves it, rank 0 or the launcher, has ended or "
                  "cannot be reached",
                  describe(), reason),
      -1);
}

// --- writing ---

void TcpStoreClient::send_frame(std::uint32_t id, StoreOp op, std::string_view head, std::string_view tail,
                                Deadline deadline) {
  const MutexLock sending(send_mutex_);
  const std::string header = encode_frame_header(id, static_cast<std::uint8_t>(op), head.size() + tail.size());
  // Waits before anything is sealed: sealing cannot be undone, because it uses up a record number.
  for (pollfd room{.fd = stream_.fd(), .events = POLLOUT, .revents = 0}; ::poll(&room, 1, 0) <= 0;)
    await_room(deadline);
  {
    const MutexLock lock(mutex_);
    if (!lost_.empty()) throw_lost(lost_);
  }
  // A partly sent frame cannot be withdrawn: the server would read what follows as its rest.
  try {
    for (const std::string_view part : {std::string_view(header), head, tail}) stream_.queue_borrowed(part);
    send_queued(deadline);
  } catch (const Timeout&) {
    lose("given up in the middle of a request, as its deadline passed");
    throw;
  } catch (...) {
    lose("given up in the middle of a request");
    throw;
  }
}

void TcpStoreClient::send_queued(Deadline deadline) {
  for (;;) {
    if (const int error = stream_.flush(); error != 0) {
      lose(errno_text(error));
      const MutexLock lock(mutex_);
      throw_lost(lost_);
    }
    if (stream_.idle()) return;
    await_room(deadline);
  }
}

void TcpStoreClient::lose(const std::string& reason, bool forged) {
  const MutexLock lock(mutex_);
  if (!lost_.empty()) return;
  lost_ = reason;
  forged_ = forged;
  if (forged) ::shutdown(stream_.fd(), SHUT_RDWR);
  changed_.notify_all();
}

/// The server stops reading from a client that does not read, so replies are read while the socket is full.
void TcpStoreClient::await_room(Deadline deadline) {
  constexpr int kLookAgainMs = 50;
  MutexLock lock(mutex_);
  if (!lost_.empty()) throw_lost(lost_);
  const bool lead = !reading_;
  if (lead) reading_ = true;
  lock.unlock();
  pollfd waiting{.fd = stream_.fd(), .events = static_cast<short>(lead ? POLLIN | POLLOUT : POLLOUT), .revents = 0};
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
  MutexLock lock(mutex_);
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
      read_for_all(lock, deadline);
    } else if (deadline.is_never()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, deadline.when());
    }
  }
}

void TcpStoreClient::read_for_all(MutexLock& lock, Deadline deadline) {
  reading_ = true;
  lock.unlock();
  pollfd waiting{.fd = stream_.fd(), .events = POLLIN, .revents = 0};
  if (::poll(&waiting, 1, deadline.poll_ms()) > 0) read_available();
  lock.lock();
  reading_ = false;
  changed_.notify_all();  // another thread may have to read now
}

/// Called only by the thread that has set `reading_`.
void TcpStoreClient::read_available() {
  std::string failure;
  bool forged = false;
  std::vector<Frame> frames;
  for (;;) {
    const auto received = stream_.receive(buffer_);
    if (received.state == MessageStream::Received::State::nothing) break;
    if (received.state == MessageStream::Received::State::end) {
      failure = fmt::format("{} by the server", stream_.end_text());
      break;
    }
    if (received.state == MessageStream::Received::State::broken) {
      failure = errno_text(received.error);
      break;
    }
    try {
      while (auto message = stream_.next()) frames.push_back(frame_of(std::move(*message)));
    } catch (const ProtocolError& error) {
      failure = error.what();
      forged = true;
      break;
    }
    if (!frames.empty()) break;
  }
  {
    const MutexLock lock(mutex_);
    for (Frame& frame : frames) {
      // A reply without an entry belongs to a caller that gave up.
      if (const auto found = calls_.find(frame.id); found != calls_.end()) {
        found->second->reply = std::move(frame);
      } else if (frame.code ==
                 static_cast<std::uint8_t>(StoreStatus::protocol)) {  // the server closes the connection for all calls
        failure = std::move(frame.body);
        forged = true;
      }
    }
  }
  if (!failure.empty()) lose(failure, forged);
}

namespace {

// The store lacks its own heartbeats, and the caller of an unanswered request may be the only one that waits.
constexpr double kLeastSilence = 30;

SecureConnection dial_any(const std::vector<Address>& addresses, const std::string& name, const Identity& identity,
                          Deadline deadline, Address& reached) {
  const Hello hello{.role = Role::store, .rank = identity.rank, .topic = "store"};
  if (addresses.size() == 1) {
    reached = addresses.front();
    return dial(reached, identity, hello, deadline, true);
  }
  // With several addresses, try each in turn: the server listens on only one of them.
  constexpr std::chrono::seconds kTryLimit{5};
  std::chrono::milliseconds pause{1};
  const auto start = Deadline::Clock::now();
  for (;;) {
    std::vector<std::string> reasons;
    for (const Address& address : addresses) {
      try {
        reached = address;
        return dial(address, identity, hello, Deadline::sooner(deadline, Deadline::after(kTryLimit)), false);
      } catch (const Timeout& error) {
        reasons.emplace_back(error.what());
      } catch (const SystemError& error) {
        reasons.emplace_back(error.what());
      }
    }
    if (deadline.remaining() <= pause) {
      const std::chrono::duration<double> waited = Deadline::Clock::now() - start;
      throw Timeout(
          fmt::format("store at {}: not reachable within {:.1f} s: {}", name, waited.count(), fmt::join(reasons, "; ")),
          {}, waited.count());
    }
    std::this_thread::sleep_for(pause);  // sleep: until the next round; there is no event for a port that opens
    pause = std::min(pause * 2, std::chrono::milliseconds(100));
  }
}

}  // namespace

std::shared_ptr<TcpStoreClient> connect_tcp_store(const std::string& host, std::uint16_t port, const Identity& identity,
                                                  Deadline deadline, std::shared_ptr<void> keep) {
  const std::string name = fmt::format("{}:{}", host, port);
  Address reached;
  SecureConnection connection = dial_any(Address::resolve(host, port, deadline), name, identity, deadline, reached);
  const double heartbeat = knob_number(Knob::heartbeat_s);
  if (heartbeat > 0) set_keepalive(connection.get(), std::max(kLeastSilence, heartbeat));
  return std::make_shared<TcpStoreClient>(std::move(connection), reached, std::move(keep));
}

}  // namespace maniple
