// Whole messages over an authenticated connection, inside records (see comm/net/secure_connection.h).
//
//   MessageStream stream(std::move(connection), length_prefixed<kMaxBytes>());
//   stream.queue(encode(message));
//   stream.flush();                     // and again when the descriptor is writable, unless idle()
//   ...
//   char room[16384];                   // when the descriptor is readable
//   stream.receive(room);
//   while (auto message = stream.next()) handle(message->body);
//
// A message is a header, which contains the length of the body, and the body:
//
//   header[format.header_bytes], body[format.length(header).bytes]
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/base/codec.h"
#include "comm/net/secure_connection.h"
#include <maniple/comm/deadline.h>

namespace maniple {

struct MessageFormat {
  struct Length {
    std::uint64_t bytes;
    std::uint64_t limit;
  };
  std::size_t header_bytes;  ///< at most kMaxMessageHeader
  /// The body length that the header announces, and the greatest one allowed. Throws ProtocolError.
  Length (*length)(std::string_view header);
};

inline constexpr std::size_t kMaxMessageHeader = 16;

/// length:u32, body[length]
template <std::uint32_t limit>
constexpr MessageFormat length_prefixed() {
  return {sizeof(std::uint32_t), [](std::string_view header) {
            return MessageFormat::Length{ByteReader(header).get<std::uint32_t>(), limit};
          }};
}

struct WireMessage {
  std::array<char, kMaxMessageHeader> header{};
  std::string body = {};
};

/// Bytes in, messages out, without any I/O. The body grows as bytes arrive: a claimed length alone costs nothing.
class MessageReader {
 public:
  explicit MessageReader(const MessageFormat& format) : format_(format) {}

  /// Takes bytes from the front of `bytes`; returns a message once one is complete, otherwise takes all. Throws
  /// ProtocolError for an invalid header and for a body that is too long; the reader cannot be used afterwards.
  std::optional<WireMessage> next(std::string_view& bytes);

  /// The header of the message being read, or of the last one while the next header is incomplete.
  std::string_view header() const noexcept { return {message_.header.data(), format_.header_bytes}; }
  bool in_message() const noexcept { return in_body_ || taken_ > 0; }

 private:
  MessageFormat format_;
  std::array<char, kMaxMessageHeader> incoming_{};  // an incomplete header
  std::size_t taken_ = 0;                           // bytes of `incoming_`
  WireMessage message_;
  std::uint64_t missing_ = 0;
  bool in_body_ = false;
};

/// Reading and writing share no state: one thread may read while another writes.
class MessageStream {
 public:
  using Clock = Deadline::Clock;

  /// `connection` has keys. Writes up to `records_at_once` records in one system call.
  MessageStream(SecureConnection connection, const MessageFormat& format, std::size_t records_at_once = 1);

  int fd() const noexcept { return fd_.get(); }
  bool is_open() const noexcept { return static_cast<bool>(fd_); }
  void close();  ///< discards queued bytes

  // ---- Reading

  struct Received {
    enum class State { bytes, nothing, end, broken } state;
    std::size_t bytes = 0;
    int error = 0;  ///< of a broken connection: errno
  };
  /// Reads once into `room`, without blocking. `room` must stay until next() has returned nullopt, which overwrites it.
  Received receive(std::span<char> room);
  /// The next complete message among the bytes received. Throws ProtocolError for bytes that are not authentic, invalid
  /// headers, and messages that are too long; the stream cannot be read from afterwards.
  std::optional<WireMessage> next();

  std::string_view header() const noexcept { return reader_.header(); }  ///< see MessageReader
  /// Describes an end of the connection: whether it cut a message off.
  std::string_view end_text() const noexcept;
  Clock::time_point heard() const noexcept { return heard_; }  ///< when something authentic arrived last

  // ---- Writing

  void queue(std::string bytes) { queue(std::make_shared<const std::string>(std::move(bytes))); }
  void queue(std::shared_ptr<const std::string> bytes);
  /// Does not copy the bytes: they must stay until flush() has made the stream idle, or has failed for good.
  void queue_borrowed(std::string_view bytes) { append({nullptr, bytes}); }
  /// Sends what the socket takes, without blocking. Returns 0, or errno if the connection is broken.
  int flush();

  bool idle() const noexcept { return pieces_.empty() && sent_ == batch_.size(); }
  std::size_t queued_bytes() const noexcept { return queued_bytes_; }  ///< not in a record yet

 private:
  struct Piece {
    std::shared_ptr<const std::string> owner;
    std::string_view bytes;
  };
  void append(Piece piece);
  bool fill();
  void fill_record();
  void consume(std::size_t count);

  UniqueFd fd_;
  RecordOpener opener_;
  std::span<char> received_;
  std::string_view plain_;
  MessageReader reader_;
  Clock::time_point heard_ = Clock::now();

  RecordSealer sealer_;
  std::size_t records_at_once_;
  std::deque<Piece> pieces_;
  std::size_t queued_bytes_ = 0;
  std::string batch_;  // records in transit
  std::size_t sent_ = 0;
};

}  // namespace maniple
