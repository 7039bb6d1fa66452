#include "launch/coordinate/agent_link.h"

#include <cerrno>

#include <fmt/format.h>

#include "comm/base/codec.h"
#include "comm/base/mutex.h"
#include "comm/base/system_error.h"
#include "comm/net/address.h"

namespace maniple::launch {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr double kLooksPerLimit = 8;

std::string frame_of(const AgentMessage& message) {
  ByteWriter frame;
  frame.put_string(encode(message));
  return frame.take();
}

std::string silence_text(Seconds silence) {
  return fmt::format("its launcher was silent for {:.1f} s (stopped, overloaded or cut off)", silence.count());
}

int milliseconds(Seconds seconds) { return static_cast<int>(std::min(seconds.count(), 1e6) * 1000); }

}  // namespace

/// State shared by the poller's thread and the heartbeat thread. Only the poller's thread reads and closes.
struct AgentLink::Wire {
  explicit Wire(SecureConnection connection) : stream(std::move(connection), length_prefixed<kMaxAgentMessage>()) {}

  Mutex mutex;  // guards everything except reading from the stream
  MessageStream stream;
  std::string beat MANIPLE_GUARDED_BY(mutex);
  Seconds interval MANIPLE_GUARDED_BY(mutex){};

  int write_error MANIPLE_GUARDED_BY(mutex) = 0;  // what broke the connection while sending; 0: nothing

  void flush() MANIPLE_REQUIRES(mutex) {
    const int error = stream.flush();
    // EPIPE follows an earlier error, or the peer's end.
    if (write_error == 0 && error != EPIPE) write_error = error;
  }

  static void send_heartbeats(const std::shared_ptr<Wire>& wire, EventLoop& loop) {
    const MutexLock lock(wire->mutex);
    MessageStream& stream = wire->stream;
    if (!stream.is_open()) return;
    wire->flush();
    if (stream.idle()) {  // a queued message serves as a heartbeat, too
      stream.queue(wire->beat);
      wire->flush();
    }
    // The timer does not keep the loop alive, but the loop exists whenever the timer fires.
    loop.call_at(Deadline::after(wire->interval), [wire, &loop] { send_heartbeats(wire, loop); });
  }
};

AgentLink::AgentLink(Poller& poller, SecureConnection connection, const Options& options, Events events)
    : poller_(poller),
      heartbeats_(EventLoop::shared()),
      wire_(std::make_shared<Wire>(std::move(connection))),
      events_(std::move(events)),
      adopt_(options.adopt),
      tolerance_(options.tolerance) {
  poller_.add(wire_->stream.fd(), EPOLLIN, [this](std::uint32_t ready) { on_ready(ready); });
  set_heartbeat(options.heartbeat);
  heartbeats_->post([wire = wire_, loop = heartbeats_.get()] { Wire::send_heartbeats(wire, *loop); });
}

AgentLink::~AgentLink() {
  *alive_ = false;
  poller_.cancel(timer_);
  const MutexLock lock(wire_->mutex);
  if (wire_->stream.is_open()) poller_.remove(wire_->stream.fd());
  wire_->stream.close();
}

void AgentLink::set_heartbeat(const Heartbeat& heartbeat) {
  heartbeat_ = heartbeat;
  const message::Alive beat{.heartbeat_ms = milliseconds(heartbeat.interval),
                            .silence_ms = milliseconds(heartbeat.silence_limit)};
  {
    const MutexLock lock(wire_->mutex);
    wire_->interval = heartbeat.interval;
    wire_->beat = frame_of(beat);
  }
  set_keepalive(wire_->stream.fd(), 2 * heartbeat.silence_limit.count());  // works even while this process is stopped
  poller_.cancel(timer_);
  timer_ = poller_.call_after(heartbeat.silence_limit / kLooksPerLimit, [this] { look_for_silence(); });
}

void AgentLink::send(const AgentMessage& message) {
  const MutexLock lock(wire_->mutex);
  MessageStream& stream = wire_->stream;
  if (!stream.is_open()) return;
  stream.queue(frame_of(message));
  wire_->flush();  // read_some() notices a broken connection
  poller_.modify(stream.fd(), stream.idle() ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

bool AgentLink::drained() const {
  const MutexLock lock(wire_->mutex);
  return wire_->stream.idle();
}

void AgentLink::on_ready(std::uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    const MutexLock lock(wire_->mutex);
    wire_->flush();
    if (wire_->stream.idle()) poller_.modify(wire_->stream.fd(), EPOLLIN);
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) read_some();
}

int AgentLink::write_error() const {
  const MutexLock lock(wire_->mutex);
  return wire_->write_error;
}

/// ETIMEDOUT comes from keepalive.
std::string AgentLink::break_text(int error) const {
  return error == ETIMEDOUT ? silence_text(Poller::Clock::now() - heard_) : errno_text(error);
}

void AgentLink::read_some() {
  const auto alive = alive_;
  MessageStream& stream = wire_->stream;
  char room[16384];
  const auto received = stream.receive(room);
  switch (received.state) {
    case MessageStream::Received::State::nothing: return;
    case MessageStream::Received::State::end: {
      // The kernel reports an error once: if sending has received it, reading only returns the end.
      const int error = write_error();
      return lose(error == 0 ? kLauncherGone : break_text(error));
    }
    case MessageStream::Received::State::broken: return lose(break_text(received.error));
    case MessageStream::Received::State::bytes: break;
  }
  try {
    for (;;) {
      const auto message = stream.next();
      if (stream.heard() > heard_) {  // only authenticated messages count as a sign of life
        heard_ = stream.heard();
        silence_reported_ = false;
      }
      if (!message) return;
      take(decode_agent_message(message->body));
      if (!*alive || !stream.is_open()) return;
    }
  } catch (const ProtocolError& error) {
    if (*alive) lose(error.what());
  }
}

void AgentLink::take(const AgentMessage& message) {
  if (const auto* dropped = std::get_if<message::Dropped>(&message)) {
    return lose(
        fmt::format("it has dropped this launcher, which was silent for {:.1f} s (was it stopped, or the network "
                    "cut?)",
                    dropped->silence_ms / 1000.0));
  }
  const auto* alive = std::get_if<message::Alive>(&message);
  if (alive == nullptr) return events_.received(message);
  if (!adopt_ || alive->heartbeat_ms <= 0 || alive->silence_ms <= 0) return;
  adopt_ = false;
  set_heartbeat({.interval = std::chrono::milliseconds(alive->heartbeat_ms),
                 .silence_limit = std::chrono::milliseconds(alive->silence_ms)});
}

void AgentLink::look_for_silence() {
  const auto alive = alive_;
  const Seconds period = heartbeat_.silence_limit / kLooksPerLimit;
  auto now = Poller::Clock::now();
  // If this thread was held up (by a slow disk, by SIGSTOP), the peer's silence proves nothing. Read what has arrived
  // meanwhile and restart the limit.
  const bool held_up = now - std::exchange(looked_, now) > 4 * period;
  if (held_up || now - heard_ > heartbeat_.silence_limit) {
    read_some();
    if (!*alive || !wire_->stream.is_open()) return;
    if (held_up) heard_ = now;
  }
  const Seconds silence = now - heard_;
  if (silence > heartbeat_.silence_limit && events_.silent && !std::exchange(silence_reported_, true)) {
    events_.silent(silence);
  }
  if (silence > heartbeat_.silence_limit + tolerance_) {
    send(message::Dropped{.silence_ms = milliseconds(silence)});
    return lose(silence_text(silence));
  }
  timer_ = poller_.call_after(period, [this] { look_for_silence(); });
}

void AgentLink::lose(const std::string& reason) {
  poller_.cancel(timer_);
  {
    const MutexLock lock(wire_->mutex);
    poller_.remove(wire_->stream.fd());
    wire_->stream.close();
  }
  const auto lost = events_.lost;
  lost(reason);
}

}  // namespace maniple::launch
