// The wire format between two ranks, for collectives and point-to-point messages alike. Pure: bytes in, fields out.
//
// A frame begins with a header of 32 bytes on the first stream of its connection; that of a collective is followed by
// the signature of the call (comm/call/signature.h), to be compared. A short payload follows at once. A long one is cut
// into pieces of 256 KiB, each behind a header of 16 bytes: piece k travels on stream k mod `streams`, so every stream
// carries its pieces in order and needs no other bookkeeping. (In shared memory nothing is cut.) Which group a frame
// belongs to is known from its connection. A *notice* is a frame without payload and signature: it is the last on its
// connection, and the frames after it travel on the connection that the receiver has opened for its own (see mesh.h).
// All integers are little-endian.
//
//   header     0 magic (3)  3 version  4 kind  5 flags  6 streams  7 dtype  8 length (8)  16 number  20 tag
//              24 CRC-32C of the payload (whole and checked only)
//              28 CRC-32C of bytes 0 to 23 and of the signature; it continues that of the payload, so it checks that
//              too
//   signature  32 (4 x 8), of a collective
//   piece      0 magic  4 number of the frame  8 index  12 CRC-32C of the payload
//
// Small on purpose: a message of a few bytes in shared memory is one cache line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/call/signature.h"

namespace maniple {

inline constexpr std::size_t kFrameHeaderBytes = 32;
inline constexpr std::size_t kSignatureBytes = 32;
inline constexpr std::size_t kMostHeaderBytes = kFrameHeaderBytes + kSignatureBytes;
inline constexpr std::size_t kPieceHeaderBytes = 16;
inline constexpr std::size_t kPieceBytes = std::size_t{256} << 10;
inline constexpr std::size_t kReadAheadBytes = 4096;  ///< what a receiver reads at once to get a header
inline constexpr int kMostStreams = 16;

enum class FrameKind : std::uint8_t { collective = 1, message = 2, notice = 3 };

struct FrameHeader {
  FrameKind kind = FrameKind::collective;
  Signature signature;       ///< of a collective
  DType dtype{};             ///< of a message
  std::int32_t tag = 0;      ///< of a message
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

/// Bytes of the header of a frame, with the signature.
constexpr std::size_t header_bytes(FrameKind kind) noexcept {
  return kind == FrameKind::collective ? kMostHeaderBytes : kFrameHeaderBytes;
}
/// The same of a header of which the first kFrameHeaderBytes are here.
inline std::size_t header_bytes(const std::byte* first) noexcept {
  return header_bytes(static_cast<FrameKind>(first[4]));
}

/// Writes header_bytes(header.kind) bytes.
void encode(const FrameHeader& header, std::byte* to) noexcept;
void encode(const PieceHeader& header, std::span<std::byte, kPieceHeaderBytes> bytes) noexcept;

/// Both throw ProtocolError for anything that `encode` cannot have written. The first reads header_bytes(first) bytes.
FrameHeader decode_frame_header(const std::byte* first);
PieceHeader decode_piece_header(std::span<const std::byte, kPieceHeaderBytes> bytes);

/// Segments in which a payload travels: 1 unless it is pieced.
constexpr std::uint64_t segment_count(std::uint64_t length, bool pieced) noexcept {
  return pieced ? (length - 1) / kPieceBytes + 1 : 1;
}

}  // namespace maniple
