#include "session/detector_wire.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "base/codec.h"
#include "base/error_codec.h"
#include "base/system_error.h"
#include "base/write_all.h"

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

constexpr std::size_t kLengthBytes = 4;

bool is_said_again(const DetectorMessage& message) {
  using Kind = DetectorMessage::Kind;
  return message.kind == Kind::heartbeat || message.kind == Kind::query_call || message.kind == Kind::compare;
}

}  // namespace

DetectorLink::DetectorLink(std::shared_ptr<EventLoop> loop, SecureConnection connection)
    : loop_(std::move(loop)),
      fd_(std::move(connection.fd)),
      opener_(connection.keys.value().cipher, connection.keys->receive),
      sealer_(connection.keys->cipher, connection.keys->send) {}

DetectorLink::~DetectorLink() { close(); }

void DetectorLink::open(Owner owner) {
  owner_ = std::move(owner);
  // The callbacks do not keep the link alive: its owner does, and removes it from the loop by letting go.
  const auto weak = weak_from_this();
  loop_->add(
      fd_.get(), EPOLLIN | EPOLLRDHUP,
      [weak](std::uint32_t ready) {
        if (const auto self = weak.lock()) self->on_ready(ready);
      },
      [weak](const std::string& why) {
        if (const auto self = weak.lock()) self->fail("this rank failed to read from it: " + why);
      });
}

void DetectorLink::close() {
  if (!fd_) return;
  loop_->remove(fd_.get());
  fd_.reset();
}

void DetectorLink::fail(const std::string& why) {
  if (!fd_) return;
  const auto self = shared_from_this();
  close();
  if (owner_.closed) owner_.closed(why);
}

void DetectorLink::on_ready(std::uint32_t ready) {
  const auto self = shared_from_this();  // the owner may let go of it meanwhile
  if ((ready & EPOLLOUT) != 0) flush();
  if ((ready & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) read();
}

void DetectorLink::read() {
  char bytes[16 * 1024];
  while (fd_) {
    const ssize_t got = ::recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got == 0 || (got < 0 && errno == ECONNRESET)) {
      return fail("its process ended without leaving the group (killed, crashed, or exited early)");
    }
    if (got < 0) return fail("its connection broke: " + errno_text(errno));
    try {
      std::span<char> sealed(bytes, static_cast<std::size_t>(got));
      while (fd_) {
        const auto plain = opener_.next(sealed);
        if (!plain) break;
        incoming_.append(*plain);
        heard_ = Clock::now();
        take_frames();
      }
    } catch (const ProtocolError& error) {
      return fail(fmt::format("its connection brought {}", error.what()));
    }
  }
}

void DetectorLink::take_frames() {
  std::size_t used = 0;
  try {
    while (fd_ && incoming_.size() - used >= kLengthBytes) {
      const std::string_view rest = std::string_view(incoming_).substr(used);
      const auto length = ByteReader(rest).get<std::uint32_t>();
      if (length > kMostControlBytes) throw ProtocolError(fmt::format("a control message of {} bytes", length));
      if (rest.size() < kLengthBytes + length) break;
      const DetectorMessage message = decode_control_message(rest.substr(kLengthBytes, length));
      used += kLengthBytes + length;
      has_received_ = true;
      owner_.message(message);
    }
  } catch (const ProtocolError& error) {
    return fail(fmt::format("it sent {}", error.what()));
  }
  incoming_.erase(0, used);
}

void DetectorLink::send(const DetectorMessage& message) {
  if (!fd_) return;
  if (!outgoing_.empty() && is_said_again(message)) return;
  if (outgoing_.size() > kMostBacklog) return;
  sealer_.seal(encode(message), outgoing_);
  flush();
}

void DetectorLink::flush() {
  if (!fd_) return;
  outgoing_.erase(0, send_all(fd_.get(), outgoing_, MSG_DONTWAIT));  // the rest: full, or broken, which reading notices
  if (std::exchange(awaits_room_, !outgoing_.empty()) == awaits_room_) return;
  loop_->modify(fd_.get(), EPOLLIN | EPOLLRDHUP | (awaits_room_ ? static_cast<std::uint32_t>(EPOLLOUT) : 0U));
}

}  // namespace maniple
