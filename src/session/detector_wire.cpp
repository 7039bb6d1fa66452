#include "session/detector_wire.h"

#include "base/codec.h"

namespace maniple {
namespace {

constexpr std::size_t kMostGroup = 1024;
constexpr std::size_t kMostText = 48 * 1024;

}  // namespace

std::string encode(const DetectorMessage& message) {
  ByteWriter body;
  body.put(message.kind);
  body.put(message.error);
  body.put(message.rank);
  body.put(message.seq);
  body.put_string(std::string_view(message.group).substr(0, kMostGroup));
  body.put_string(std::string_view(message.text).substr(0, kMostText));
  ByteWriter frame;
  frame.put_string(body.bytes());
  return frame.take();
}

DetectorMessage decode_control_message(std::string_view bytes) {
  ByteReader reader(bytes);
  DetectorMessage message;
  const auto kind = reader.get<std::uint8_t>();
  const auto error = reader.get<std::uint8_t>();
  if (kind < 1 || kind > static_cast<std::uint8_t>(DetectorMessage::Kind::position))
    throw ProtocolError("a control message of unknown kind " + std::to_string(kind));
  if (error > static_cast<std::uint8_t>(ErrorKind::unsupported)) throw ProtocolError("a control message with an unknown error");
  message.kind = static_cast<DetectorMessage::Kind>(kind);
  message.error = static_cast<ErrorKind>(error);
  message.rank = reader.get<std::int32_t>();
  message.seq = reader.get<std::uint64_t>();
  message.group = reader.get_string(kMostGroup);
  message.text = reader.get_string(kMostText);
  reader.expect_end();
  return message;
}

}  // namespace maniple
