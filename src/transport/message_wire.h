// The header of a point-to-point message. Pure: bytes in, fields out.
//
//   0 magic  4 dtype  5 flags (1: checked)  6 zero (2)  8 tag  12 zero (4)  16 length  24 zero (4)  28 CRC-32C of the 28 before
//
// The payload follows in pieces of 256 KiB; on a network each piece is followed by its CRC-32C.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <maniple/comm/types.h>

namespace maniple {

inline constexpr std::size_t kMessageHeaderBytes = 32;
inline constexpr std::size_t kMessagePieceBytes = std::size_t{256} << 10;

struct MessageHeader {
  DType dtype = DType::uint8;
  bool checked = false;
  std::int32_t tag = 0;
  std::uint64_t length = 0;
  friend bool operator==(const MessageHeader&, const MessageHeader&) = default;
};

using MessageHeaderBytes = std::array<std::byte, kMessageHeaderBytes>;
MessageHeaderBytes encode(const MessageHeader& header) noexcept;
/// Throws ProtocolError for anything that `encode` cannot have written.
MessageHeader decode_message_header(const MessageHeaderBytes& bytes);

}  // namespace maniple
