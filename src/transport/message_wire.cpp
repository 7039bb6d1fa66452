#include "transport/message_wire.h"

#include <cstring>
#include <string_view>

#include "base/codec.h"
#include "base/crc32c.h"

namespace maniple {
namespace {

constexpr std::uint32_t kMagic = 0x3270706d;  // "mpp2"

}  // namespace

MessageHeaderBytes encode(const MessageHeader& header) noexcept {
  ByteWriter writer;
  writer.put(kMagic);
  writer.put(static_cast<std::uint8_t>(header.dtype));
  writer.put(static_cast<std::uint8_t>(header.checked ? 1 : 0));
  writer.put(std::uint16_t{0});
  writer.put(header.tag);
  writer.put(std::uint32_t{0});
  writer.put(header.length);
  writer.put(std::uint32_t{0});
  writer.put(crc32c(0, writer.bytes().data(), writer.bytes().size()));
  MessageHeaderBytes bytes{};
  std::memcpy(bytes.data(), writer.bytes().data(), bytes.size());
  return bytes;
}

MessageHeader decode_message_header(const MessageHeaderBytes& bytes) {
  ByteReader reader(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  if (reader.get<std::uint32_t>() != kMagic) throw ProtocolError("bytes that do not begin a message");
  MessageHeader header;
  const auto dtype = reader.get<std::uint8_t>();
  const auto flags = reader.get<std::uint8_t>();
  const auto zero = reader.get<std::uint16_t>();
  header.tag = reader.get<std::int32_t>();
  const auto more_zero = reader.get<std::uint32_t>();
  header.length = reader.get<std::uint64_t>();
  const auto last_zero = reader.get<std::uint32_t>();
  if (reader.get<std::uint32_t>() != crc32c(0, bytes.data(), kMessageHeaderBytes - 4)) {
    throw ProtocolError("a message header with a wrong checksum");
  }
  if (dtype >= kDTypeCount || flags > 1 || zero != 0 || more_zero != 0 || last_zero != 0) {
    throw ProtocolError("a message header with impossible fields");
  }
  header.dtype = static_cast<DType>(dtype);
  header.checked = flags == 1;
  return header;
}

}  // namespace maniple
