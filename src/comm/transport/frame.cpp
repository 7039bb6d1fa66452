#include "comm/transport/frame.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

#include "comm/base/crc32c.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::uint32_t kMagic = 0x46'504dU;         // "MPF"
constexpr std::uint32_t kPieceMagic = 0x504e'504dU;  // "MPNP"
constexpr std::uint8_t kVersion = 4;
constexpr std::uint8_t kChecked = 1;
constexpr std::uint8_t kPieced = 2;
constexpr std::size_t kPayloadCheckAt = 24;
constexpr std::size_t kCheckAt = 28;

template <class T>
T little_endian(T value) noexcept {
  if constexpr (std::endian::native == std::endian::little || sizeof(T) == 1) return value;
  T swapped = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) swapped = static_cast<T>(swapped << 8 | (value >> (8 * i) & 0xff));
  return swapped;
}

template <class T>
void store(std::byte* at, T value) noexcept {
  const T bytes = little_endian(value);
  std::memcpy(at, &bytes, sizeof bytes);
}

template <class T>
T load(const std::byte* at) noexcept {
  T bytes;
  std::memcpy(&bytes, at, sizeof bytes);
  return little_endian(bytes);
}

std::uint32_t check_of(const std::byte* at) noexcept {
  const std::uint32_t check = crc32c(load<std::uint32_t>(at + kPayloadCheckAt), at, kPayloadCheckAt);
  return header_bytes(at) == kFrameHeaderBytes ? check : crc32c(check, at + kFrameHeaderBytes, kSignatureBytes);
}

bool possible(const FrameHeader& header) noexcept {
  if (header.kind != FrameKind::message) {
    const bool empty = header.length == 0 && header.check == 0 && !header.checked && header.streams == 1;
    return header.dtype == DType{} && header.tag == 0 && (empty || header.kind == FrameKind::collective);
  }
  return static_cast<int>(header.dtype) < kDTypeCount && (header.length & (size_of(header.dtype) - 1)) == 0 &&
         header.streams == 1;
}

}  // namespace

void encode(const FrameHeader& header, std::byte* to) noexcept {
  const bool message = header.kind == FrameKind::message;
  store(to, kMagic | std::uint32_t{kVersion} << 24);
  to[4] = static_cast<std::byte>(header.kind);
  to[5] = static_cast<std::byte>((header.checked ? kChecked : 0) | (header.pieced ? kPieced : 0));
  to[6] = std::byte{header.streams};
  to[7] = static_cast<std::byte>(message ? header.dtype : DType{});
  store(to + 8, header.length);
  store(to + 16, header.number);
  store(to + 20, static_cast<std::uint32_t>(message ? header.tag : 0));
  store(to + kPayloadCheckAt, header.check);
  if (header.kind == FrameKind::collective) {
    store(to + 32, header.signature.seq);
    store(to + 40, header.signature.what);
    store(to + 48, header.signature.count);
    store(to + 56, header.signature.detail);
  }
  store(to + kCheckAt, check_of(to));
}

void encode(const PieceHeader& header, std::span<std::byte, kPieceHeaderBytes> bytes) noexcept {
  store(bytes.data(), kPieceMagic);
  store(bytes.data() + 4, header.number);
  store(bytes.data() + 8, header.index);
  store(bytes.data() + 12, header.check);
}

FrameHeader decode_frame_header(const std::byte* first) {
  const auto magic = load<std::uint32_t>(first);
  if ((magic & 0xff'ffff) != kMagic) {
    throw ProtocolError(fmt::format("not a frame header: it begins with {:#010x}", magic));
  }
  if (const auto version = magic >> 24; version != kVersion) {
    throw ProtocolError(
        fmt::format("frame format {}, expected {}; run the same release on all ranks", version, kVersion));
  }
  const auto check = load<std::uint32_t>(first + kCheckAt);
  if (const auto computed = check_of(first); check != computed) {
    throw ProtocolError(fmt::format("corrupt frame header: CRC-32C {:08x}, computed {:08x}", check, computed));
  }
  FrameHeader header;
  header.kind = static_cast<FrameKind>(first[4]);
  if (header.kind < FrameKind::collective || header.kind > FrameKind::notice) {
    throw ProtocolError(fmt::format("frame of unknown kind {}", static_cast<int>(header.kind)));
  }
  const auto flags = static_cast<std::uint8_t>(first[5]);
  if ((flags & ~(kChecked | kPieced)) != 0) {
    throw ProtocolError(fmt::format("frame with unknown flags {:#04x}", flags));
  }
  header.checked = (flags & kChecked) != 0;
  header.pieced = (flags & kPieced) != 0;
  header.streams = static_cast<std::uint8_t>(first[6]);
  header.dtype = static_cast<DType>(first[7]);
  header.length = load<std::uint64_t>(first + 8);
  header.number = load<std::uint32_t>(first + 16);
  header.tag = static_cast<std::int32_t>(load<std::uint32_t>(first + 20));
  header.check = load<std::uint32_t>(first + kPayloadCheckAt);
  if (header.kind == FrameKind::collective) {
    header.signature = {load<std::uint64_t>(first + 32), load<std::uint64_t>(first + 40),
                        load<std::uint64_t>(first + 48), load<std::uint64_t>(first + 56)};
  }
  if (header.streams < 1 || header.streams > kMaxStreams) {
    throw ProtocolError(fmt::format("frame over {} streams; 1 to {} are possible", header.streams, kMaxStreams));
  }
  if (header.pieced && header.length == 0) throw ProtocolError("an empty frame in pieces");
  if (!possible(header)) {
    throw ProtocolError(fmt::format("frame with impossible fields: kind {}, dtype {}, tag {}, {} bytes, {} streams",
                                    static_cast<int>(header.kind), static_cast<int>(header.dtype), header.tag,
                                    header.length, header.streams));
  }
  return header;
}

PieceHeader decode_piece_header(std::span<const std::byte, kPieceHeaderBytes> bytes) {
  if (const auto magic = load<std::uint32_t>(bytes.data()); magic != kPieceMagic) {
    throw ProtocolError(fmt::format("not a piece header: it begins with {:#010x}", magic));
  }
  return {load<std::uint32_t>(bytes.data() + 4), load<std::uint32_t>(bytes.data() + 8),
          load<std::uint32_t>(bytes.data() + 12)};
}

}  // namespace maniple
