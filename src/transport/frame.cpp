#include "transport/frame.h"

#include <fmt/format.h>

#include "base/crc32c.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::uint32_t kFrameMagic = 0x464e'504dU;  // "MPNF"
constexpr std::uint32_t kPieceMagic = 0x504e'504dU;  // "MPNP"
constexpr std::uint8_t kVersion = 2;
constexpr std::uint8_t kChecked = 1;
constexpr std::uint8_t kPieced = 2;
constexpr std::size_t kCheckAt = kFrameHeaderBytes - sizeof(std::uint32_t);

template <class T>
void store(std::byte* at, T value) noexcept {
  for (std::size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<std::byte>(value >> (8 * i));
}

template <class T>
T load(const std::byte* at) noexcept {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value | static_cast<T>(at[i]) << (8 * i));
  return value;
}

std::uint8_t load_byte(const std::byte* at) noexcept { return static_cast<std::uint8_t>(*at); }

}  // namespace

void encode(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> bytes) noexcept {
  std::byte* const at = bytes.data();
  store(at, kFrameMagic);
  at[4] = std::byte{kVersion};
  at[5] = static_cast<std::byte>(header.kind);
  at[6] = static_cast<std::byte>((header.checked ? kChecked : 0) | (header.pieced ? kPieced : 0));
  at[7] = std::byte{header.streams};
  store(at + 8, header.signature.seq);
  store(at + 16, header.signature.what);
  store(at + 24, header.signature.count);
  store(at + 32, header.signature.detail);
  store(at + 40, header.length);
  store(at + 48, header.number);
  store(at + 52, header.check);
  store(at + 56, std::uint32_t{0});
  store(at + kCheckAt, crc32c(0, at, kCheckAt));
}

void encode(const PieceHeader& header, std::span<std::byte, kPieceHeaderBytes> bytes) noexcept {
  store(bytes.data(), kPieceMagic);
  store(bytes.data() + 4, header.number);
  store(bytes.data() + 8, header.index);
  store(bytes.data() + 12, header.check);
}

FrameHeader decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  const std::byte* const at = bytes.data();
  if (const auto magic = load<std::uint32_t>(at); magic != kFrameMagic) {
    throw ProtocolError(fmt::format("not a frame header: it begins with {:#010x}", magic));
  }
  if (const auto version = load_byte(at + 4); version != kVersion) {
    throw ProtocolError(
        fmt::format("frame format {}, expected {}; run the same release on all ranks", version, kVersion));
  }
  const auto check = load<std::uint32_t>(at + kCheckAt);
  if (const auto computed = crc32c(0, at, kCheckAt); check != computed) {
    throw ProtocolError(fmt::format("corrupt frame header: CRC-32C {:08x}, computed {:08x}", check, computed));
  }
  const std::uint8_t kind = load_byte(at + 5);
  if (kind != static_cast<std::uint8_t>(FrameKind::collective) &&
      kind != static_cast<std::uint8_t>(FrameKind::message)) {
    throw ProtocolError(fmt::format("frame of unknown kind {}", kind));
  }
  const std::uint8_t flags = load_byte(at + 6);
  if ((flags & ~(kChecked | kPieced)) != 0 || load<std::uint32_t>(at + 56) != 0) {
    throw ProtocolError(fmt::format("frame with unknown flags {:#04x}", flags));
  }
  FrameHeader header;
  header.kind = static_cast<FrameKind>(kind);
  header.checked = (flags & kChecked) != 0;
  header.pieced = (flags & kPieced) != 0;
  header.streams = load_byte(at + 7);
  header.signature = {load<std::uint64_t>(at + 8), load<std::uint64_t>(at + 16), load<std::uint64_t>(at + 24),
                      load<std::uint64_t>(at + 32)};
  header.length = load<std::uint64_t>(at + 40);
  header.number = load<std::uint32_t>(at + 48);
  header.check = load<std::uint32_t>(at + 52);
  if (header.streams < 1 || header.streams > kMostStreams) {
    throw ProtocolError(fmt::format("frame over {} streams; 1 to {} are possible", header.streams, kMostStreams));
  }
  if (header.pieced && header.length == 0) throw ProtocolError("an empty frame in pieces");
  if (header.kind == FrameKind::message && (!header.signature.is_message(header.length) || header.streams != 1)) {
    throw ProtocolError(
        fmt::format("message with impossible fields: {}, {} bytes", header.signature.describe(), header.length));
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
