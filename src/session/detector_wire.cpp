#include "session/detector_wire.h"

#include "base/codec.h"
#include "base/error_codec.h"

namespace maniple {
namespace {

constexpr std::size_t kMostGroup = 1024;
constexpr std::size_t kMostText = 48 * 1024;

}  // namespace

std::string encode(const DetectorMessage& message) {
  ByteWriter body;
  body.put(message.kind);
  body.put(message.rank);
  body.put(message.seq);
  body.put_string(std::string_view(message.group).substr(0, kMostGroup));
  const bool aborts = message.kind == DetectorMessage::Kind::abort;
  body.put_string(aborts ? encode_error(message.error, kMostText) : message.text.substr(0, kMostText));
  ByteWriter frame;
  frame.put_string(body.bytes());
  return frame.take();
}

DetectorMessage decode_control_message(std::string_view bytes) {
  ByteReader reader(bytes);
  DetectorMessage message;
  const auto kind = reader.get<std::uint8_t>();
  if (kind < 1 || kind > static_cast<std::uint8_t>(DetectorMessage::Kind::progress_reply))
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
  reader.expect_end();
  return message;
}

}  // namespace maniple
