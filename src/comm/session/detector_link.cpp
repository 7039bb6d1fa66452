#include "comm/session/detector_link.h"

#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "comm/base/system_error.h"

namespace maniple {
DetectorLink::DetectorLink(std::shared_ptr<EventLoop> loop, SecureConnection connection)
    : loop_(std::move(loop)), stream_(std::move(connection), length_prefixed<detector::kMaxFrameBytes>()) {}

DetectorLink::~DetectorLink() { close(); }

void DetectorLink::open(Owner owner) {
  owner_ = std::move(owner);
  // The callbacks do not keep the link alive: its owner does, and dropping it removes it from the loop.
  const auto weak = weak_from_this();
  loop_->add(
      stream_.fd(), EPOLLIN | EPOLLRDHUP,
      [weak](std::uint32_t ready) {
        if (const auto self = weak.lock()) self->on_ready(ready);
      },
      [weak](const std::string& why) {
        if (const auto self = weak.lock()) self->fail("this rank failed to read from it: " + why);
      });
}

void DetectorLink::close() {
  if (!stream_.is_open()) return;
  loop_->remove(stream_.fd());
  stream_.close();
}

void DetectorLink::fail(const std::string& why) {
  if (!stream_.is_open()) return;
  const auto self = shared_from_this();
  close();
  if (owner_.closed) owner_.closed(why);
}

void DetectorLink::on_ready(std::uint32_t ready) {
  const auto self = shared_from_this();  // the owner may drop this link meanwhile
  if ((ready & EPOLLOUT) != 0) flush();
  if ((ready & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) read();
}

void DetectorLink::read() {
  using State = MessageStream::Received::State;
  char room[16 * 1024];
  while (stream_.is_open()) {
    const auto received = stream_.receive(room);
    if (received.state == State::nothing) return;
    if (received.state == State::end || received.error == ECONNRESET) {
      return fail("its process ended without leaving the group (killed, crashed, or exited early)");
    }
    if (received.state == State::broken) return fail("its connection broke: " + errno_text(received.error));
    try {
      take_messages();
    } catch (const ProtocolError& error) {
      return fail(fmt::format("its connection brought {}", error.what()));
    }
  }
}

void DetectorLink::take_messages() {
  const auto heard = stream_.heard();
  bool whole = false;
  while (stream_.is_open()) {
    const auto message = stream_.next();
    if (!message) break;
    whole = true;
    owner_.message(detector::decode(message->body));
  }
  if (!whole && stream_.is_open() && stream_.heard() != heard && owner_.heard) owner_.heard();
}

void DetectorLink::send(const detector::Message& message) {
  if (!stream_.is_open()) return;
  if (!stream_.idle() && detector::is_repeated(message)) return;
  if (stream_.queued_bytes() > kMostBacklog) return;
  stream_.queue(detector::encode(message));
  flush();
}

void DetectorLink::flush() {
  if (!stream_.is_open()) return;
  stream_.flush();  // a broken connection is detected by reading
  if (std::exchange(awaits_room_, !stream_.idle()) == awaits_room_) return;
  loop_->modify(stream_.fd(), EPOLLIN | EPOLLRDHUP | (awaits_room_ ? static_cast<std::uint32_t>(EPOLLOUT) : 0U));
}

}  // namespace maniple
