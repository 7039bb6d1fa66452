// Messages over one channel, in one direction: OutgoingStream writes, IncomingStream reads. Neither ever blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "transport/byte_channel.h"
#include "transport/message.h"
#include "transport/message_wire.h"

namespace maniple {

/// Where in a payload a stream is: the piece at hand and how much of it, its check included, has moved.
struct PiecePosition {
  std::size_t length = 0;  // of the payload
  std::size_t begin = 0;   // of the piece in the payload
  std::size_t within = 0;  // the piece, moved so far
  std::size_t trailer = 0; // bytes of check behind each piece
  std::uint32_t check = 0;

  std::size_t piece() const noexcept { return std::min(kMessagePieceBytes, length - begin); }
  bool complete() const noexcept { return begin == length; }
  std::size_t payload_moved() const noexcept { return begin + std::min(within, piece()); }
};

/// Writes one message at a time.
class OutgoingStream {
 public:
  explicit OutgoingStream(std::unique_ptr<ByteSink> sink) : sink_(std::move(sink)) {}
  void begin(const Message& message);
  /// Moves what can move, some MiB at most; true when the whole message has been handed to the channel.
  bool advance(Message& message, bool& moved);
  int fd() const noexcept { return sink_->fd(); }

 private:
  std::unique_ptr<ByteSink> sink_;
  MessageHeaderBytes header_{};
  std::size_t header_sent_ = 0;
  PiecePosition at_;
};

/// Reads one message at a time: first its header, then, once somebody has said where to, its payload.
class IncomingStream {
 public:
  explicit IncomingStream(std::unique_ptr<ByteSource> source) : source_(std::move(source)) {}
  /// The header of the message at hand; null until it has arrived whole.
  const MessageHeader* peek(bool& moved);
  /// Moves payload into `data` (header->length bytes), some MiB at most, counting it in `done`; true when complete and checked.
  bool advance(std::byte* data, std::size_t& done, bool& moved);
  void next() noexcept { header_.reset(); }  ///< the message is dealt with
  int fd() const noexcept { return source_->fd(); }

 private:
  std::unique_ptr<ByteSource> source_;
  MessageHeaderBytes header_bytes_{};
  std::size_t header_got_ = 0;
  std::optional<MessageHeader> header_;
  PiecePosition at_;
};

}  // namespace maniple
