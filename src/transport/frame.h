// The wire format between two ranks, for collectives and point-to-point messages alike. Pure: bytes in, fields out.
//
// A frame begins with a header of 64 bytes on the first stream of its connection. A short payload follows it at once. A long
// one is cut into pieces of 256 KiB, each behind a header of 16 bytes: piece k travels on stream
// k mod `streams`, so every stream carries its pieces in order and needs no other bookkeeping. (In shared memory nothing is
// cut.) Which group a frame belongs to is known from its connection. All integers are little-endian.
//
//   frame    0 magic  4 version  5 kind  6 flags  7 streams  8 signature (4 x 8)  40 length  48 number
//            52 CRC-32C of the payload (whole and checked only)  56 zero  60 CRC-32C of the 60 bytes before
//   piece    0 magic  4 number of the frame  8 index  12 CRC-32C of the payload
//
// The signature is what the sender called (call/signature.h): of a collective, to be compared; of a message, with its dtype,
// count and tag, to be matched with a receive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "call/signature.h"

namespace maniple {

inline constexpr std::size_t kFrameHeaderBytes = 64;
inline constexpr std::size_t kPieceHeaderBytes = 16;
inline constexpr std::size_t kPieceBytes = std::size_t{256} << 10;
inline constexpr std::size_t kReadAheadBytes = 4096;  ///< what a receiver reads at once to get a header
inline constexpr int kMostStreams = 16;

enum class FrameKind : std::uint8_t { collective = 1, message = 2 };

struct FrameHeader {
  FrameKind kind = FrameKind::collective;
  Signature signature;
  std::uint64_t length = 0;  ///< bytes of payload
  std::uint32_t number = 0;  ///< frames sent on this connection before, modulo 2^32
  std::uint32_t check = 0;   ///< of the payload, when checked and not pieced
  std::uint8_t streams = 1;  ///< that the sender spreads pieces over
  bool checked = false;      ///< payloads carry a CRC-32C
  bool pieced = false;       ///< the payload comes in pieces
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

struct PieceHeader {
  std::uint32_t number = 0;  ///< of the frame, as in its header
  std::uint32_t index = 0;   ///< of the piece in the frame
  std::uint32_t check = 0;   ///< of the piece's payload; 0 when not checked
  friend bool operator==(const PieceHeader&, const PieceHeader&) = default;
};

void encode(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> bytes) noexcept;
void encode(const PieceHeader& header, std::span<std::byte, kPieceHeaderBytes> bytes) noexcept;

/// Throw ProtocolError for anything that `encode` cannot have written.
FrameHeader decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes);
PieceHeader decode_piece_header(std::span<const std::byte, kPieceHeaderBytes> bytes);

/// Segments in which a payload travels: 1 unless it is pieced.
constexpr std::uint64_t segment_count(std::uint64_t length, bool pieced) noexcept {
  return pieced ? (length - 1) / kPieceBytes + 1 : 1;
}

}  // namespace maniple
