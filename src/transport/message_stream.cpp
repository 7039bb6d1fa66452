#include "transport/message_stream.h"

#include <array>

#include "base/crc32c.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

// What one call moves at most, so that others have their turn: 8 MiB.
constexpr int kPiecesAtOnce = 32;

// iovec has no const form; the channel only reads what it writes out.
iovec part_of(const void* data, std::size_t bytes) { return {const_cast<void*>(data), bytes}; }

// The parts of a piece that have not moved: the rest of its payload, the rest of its check.
std::size_t remaining_parts(const std::byte* data, PiecePosition& at, std::array<iovec, 2>& parts) {
  std::size_t count = 0;
  if (at.within < at.piece()) parts[count++] = part_of(data + at.begin + at.within, at.piece() - at.within);
  if (at.trailer != 0) {
    const std::size_t into = at.within > at.piece() ? at.within - at.piece() : 0;
    parts[count++] = part_of(reinterpret_cast<const std::byte*>(&at.check) + into, at.trailer - into);
  }
  return count;
}

}  // namespace

void OutgoingStream::begin(const Message& message) {
  const bool checked = sink_->fd() >= 0 && !sink_->authenticates();
  header_ = encode(MessageHeader{message.dtype, checked, message.tag, message.bytes});
  header_sent_ = 0;
  at_ = {message.bytes, 0, 0, checked ? sizeof at_.check : 0, 0};
}

bool OutgoingStream::advance(Message& message, bool& moved) {
  while (header_sent_ < kMessageHeaderBytes) {
    const iovec part = part_of(header_.data() + header_sent_, kMessageHeaderBytes - header_sent_);
    const std::size_t written = sink_->write_some({&part, 1});
    if (written == 0) return false;
    moved = true;
    header_sent_ += written;
  }
  for (int pieces = 0; !at_.complete();) {
    if (pieces == kPiecesAtOnce) return false;
    if (at_.within == 0 && at_.trailer != 0) at_.check = crc32c(0, message.data + at_.begin, at_.piece());
    std::array<iovec, 2> parts;
    const std::size_t count = remaining_parts(message.data, at_, parts);
    const std::size_t written = sink_->write_some({parts.data(), count});
    if (written == 0) return false;
    moved = true;
    at_.within += written;
    message.moved = at_.payload_moved();
    if (at_.within == at_.piece() + at_.trailer) {
      at_.begin += at_.piece();
      at_.within = 0;
      ++pieces;
    }
  }
  return true;
}

const MessageHeader* IncomingStream::peek(bool& moved) {
  while (!header_) {
    const iovec part{header_bytes_.data() + header_got_, kMessageHeaderBytes - header_got_};
    const std::size_t got = source_->read_some({&part, 1});
    if (got == 0) return nullptr;
    moved = true;
    header_got_ += got;
    if (header_got_ < kMessageHeaderBytes) continue;
    header_ = decode_message_header(header_bytes_);
    header_got_ = 0;
    at_ = {header_->length, 0, 0, header_->checked ? sizeof at_.check : 0, 0};
  }
  return &*header_;
}

bool IncomingStream::advance(std::byte* data, std::size_t& done, bool& moved) {
  for (int pieces = 0; !at_.complete(); ++pieces) {
    if (pieces == kPiecesAtOnce) return false;
    std::array<iovec, 2> parts;
    const std::size_t count = remaining_parts(data, at_, parts);
    const std::size_t got = source_->read_some({parts.data(), count});
    if (got == 0) return false;
    moved = true;
    at_.within += got;
    done = at_.payload_moved();
    if (at_.within < at_.piece() + at_.trailer) continue;
    if (at_.trailer != 0 && at_.check != crc32c(0, data + at_.begin, at_.piece())) {
      throw ProtocolError("a message whose bytes do not match their checksum");
    }
    at_.begin += at_.piece();
    at_.within = 0;
  }
  return true;
}

}  // namespace maniple
