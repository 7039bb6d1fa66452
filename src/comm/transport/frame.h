// The wire format between two ranks, for collectives and point-to-point messages alike. Encodes and decodes only; no
// I/O.
//
// A frame begins with a header of 32 bytes on the first stream of its connection. In a collective's frame the call's
// signature follows (comm/call/signature.h), which the receiver compares. A short payload follows at once. A long one
// is cut into pieces of 256 KiB, each behind a header of 16 bytes. Piece k travels on stream k mod `streams`, so each
// stream carries its pieces in order and needs no other bookkeeping. (Shared memory is never cut.) The connection
// identifies the frame's group. A *notice* is a frame without payload and signature. It is the last frame on its
// connection: later frames travel on the connection that the receiver opened for its own frames (see mesh.h). All
// integers are little-endian.
//
//   header     0 magic (3)  3 version  4 kind  5 flags  6 streams  7 dtype  8 length (8)  16 number  20 tag
//              24 CRC-32C of the payload (whole and checked only)
//              28 CRC-32C of bytes 0 to 23 and of the signature, continued from the payload's CRC, so it covers that
//   signature  32 (4 x 8), of a collective
//   piece      0 magic  4 number of the frame  8 index  12 CRC-32C of the payload
//
// The header is small so that a message of a few bytes in shared memory takes one cache line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/call/signature.h"

namespace maniple {

inline constexpr std::size_t kFrameHeaderBytes = 32;
inline constexpr std::size_t kSignatureBytes = 32;
inline constexpr std::size_t kMaxHeaderBytes = kFrameHeaderBytes + kSignatureBytes;
inline constexpr std::size_t kPieceHeaderBytes = 16;
inline constexpr std::size_t kPieceBytes = std::size_t{256} << 10;
inline constexpr std::size_t kReadAheadBytes = 4096;  ///< how much a receiver reads at once to get a header
inline constexpr int kMaxStreams = 16;

enum class FrameKind : std::uint8_t { collective = 1, message = 2, notice = 3 };

struct FrameHeader {
  FrameKind kind = FrameKind::collective;
  Signature signature;       ///< collectives only
  DType dtype{};             ///< messages only
  std::int32_t tag = 0;      ///< messages only
  std::uint64_t length = 0;  ///< bytes of payload
  std::uint32_t number = 0;  ///< frames sent earlier on this connection, modulo 2^32
  std::uint32_t check = 0;   ///< CRC-32C of the payload, when checked and not pieced
  std::uint8_t streams = 1;  ///< number of streams that carry the pieces
  bool checked = false;      ///< payloads carry a CRC-32C
  bool pieced = false;       ///< the payload comes in pieces
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

struct PieceHeader {
  std::uint32_t number = 0;  ///< the frame's, as in its header
  std::uint32_t index = 0;   ///< the piece's, in its frame
  std::uint32_t check = 0;   ///< CRC-32C of the piece's payload; 0 when not checked
  friend bool operator==(const PieceHeader&, const PieceHeader&) = default;
};

/// Size of a frame's header in bytes, including the signature.
constexpr std::size_t header_bytes(FrameKind kind) noexcept {
  return kind == FrameKind::collective ? kMaxHeaderBytes : kFrameHeaderBytes;
}
/// The same, given the first kFrameHeaderBytes of the header.
inline std::size_t header_bytes(const std::byte* first) noexcept {
  return header_bytes(static_cast<FrameKind>(first[4]));
}

/// Writes header_bytes(header.kind) bytes.
void encode(const FrameHeader& header, std::byte* to) noexcept;
void encode(const PieceHeader& header, std::span<std::byte, kPieceHeaderBytes> bytes) noexcept;

/// Both throw ProtocolError for bytes that `encode` cannot have written. The first reads header_bytes(first) bytes.
FrameHeader decode_frame_header(const std::byte* first);
PieceHeader decode_piece_header(std::span<const std::byte, kPieceHeaderBytes> bytes);

/// Number of segments that carry a payload: 1 unless it is pieced.
constexpr std::uint64_t segment_count(std::uint64_t length, bool pieced) noexcept {
  return pieced ? (length - 1) / kPieceBytes + 1 : 1;
}

}  // namespace maniple
