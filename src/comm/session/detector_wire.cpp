#include "comm/session/detector_wire.h"

#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "comm/base/codec.h"
#include "comm/base/error_codec.h"
#include "comm/base/system_error.h"

namespace maniple {
namespace {

constexpr std::size_t kMostGroup = 1024;
constexpr std::size_t kMostText = 48 * 1024;
constexpr std::size_t kMostPlace = 1024;

}  // namespace

std::string encode(const DetectorMessage& message) {
  ByteWriter body;
  body.put(message.kind);
  body.put(message.rank);
  body.put(message.seq);
  body.put_string(std::string_view(message.group).substr(0, kMostGroup));
  const bool aborts = message.kind == DetectorMessage::Kind::abort;
  body.put_string(aborts ? encode_error(message.error, kMostText) : message.text.substr(0, kMostText));
  if (message.kind == DetectorMessage::Kind::call_reply) body.put_string(message.place.substr(0, kMostPlace));
  ByteWriter frame;
  frame.put_string(body.bytes());
  return frame.take();
}

DetectorMessage decode_control_message(std::string_view bytes) {
  ByteReader reader(bytes);
  DetectorMessage message;
  const auto kind = reader.get<std::uint8_t>();
  if (kind < 1 || kind > static_cast<std::uint8_t>(DetectorMessage::Kind::alive))
    throw ProtocolError("a control message of unknown kind " + std::to_string(kind));
  message.kind = static_cast<DetectorMessage::Kind>(kind);
  message.rank = reader.get<std::int32_t>();
  message.seq = reader.get<std::uint64_t>();
  message.group = reader.get_string(kMostGroup);
  const std::string_view text = reader.get_string(kMostText);
  if (message.kind == DetectorMessage::Kind::abort) {
    message.error = decode_error(text);
  } else {
    message.text = text;
  }
  if (message.kind == DetectorMessage::Kind::call_reply) message.place = reader.get_string(kMostPlace);
  reader.expect_end();
  return message;
}

namespace {

bool is_said_again(const DetectorMessage& message) {
  using Kind = DetectorMessage::Kind;
  return message.kind == Kind::heartbeat || message.kind == Kind::query_call || message.kind == Kind::compare;
}

}  // namespace

DetectorLink::DetectorLink(std::shared_ptr<EventLoop> loop, SecureConnection connection)
    : loop_(std::move(loop)), stream_(std::move(connection), length_prefixed<kMostControlBytes>()) {}

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
  while (stream_.is_open()) {
    const auto message = stream_.next();
    if (!message) return;
    const DetectorMessage decoded = decode_control_message(message->body);
    has_received_ = true;
    owner_.message(decoded);
  }
}

void DetectorLink::send(const DetectorMessage& message) {
  if (!stream_.is_open()) return;
  if (!stream_.idle() && is_said_again(message)) return;
  if (stream_.queued_bytes() > kMostBacklog) return;
  stream_.queue(encode(message));
  flush();
}

void DetectorLink::flush() {
  if (!stream_.is_open()) return;
  stream_.flush();  // a broken connection is detected by reading
  if (std::exchange(awaits_room_, !stream_.idle()) == awaits_room_) return;
  loop_->modify(stream_.fd(), EPOLLIN | EPOLLRDHUP | (awaits_room_ ? static_cast<std::uint32_t>(EPOLLOUT) : 0U));
}

}  // namespace maniple
