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
  /// The body length announced by the header, and the maximum allowed. Throws ProtocolError.
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

/// Parses bytes into messages, without I/O. The body grows as bytes arrive, so announcing a large length does not
/// allocate memory.
class MessageReader {
 public:
  explicit MessageReader(const MessageFormat& format) : format_(format) {}

  /// Consumes bytes from the front of `bytes`. Returns a message once one is complete; until then consumes everything.
  /// Throws ProtocolError for an invalid header or an oversized body; the reader cannot be used afterwards.
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

/// Reading and writing do not share state: one thread may read while another writes.
class MessageStream {
 public:
  using Clock = Deadline::Clock;

  /// `connection` must have keys. Writes up to `records_at_once` records in one system call.
  MessageStream(SecureConnection connection, const MessageFormat& format, std::size_t records_at_once = 1);

  int fd() const noexcept { return fd_.get(); }
  bool is_open() const noexcept { return static_cast<bool>(fd_); }
  void close();  ///< discards queued bytes

  // ---- Reading

  struct Received {
    enum class State { bytes, nothing, end, broken } state;
    std::size_t bytes = 0;
    int error = 0;  ///< errno of a broken connection
  };
  /// Reads once into `room`, without blocking. `room` must stay valid until next() returns nullopt; next() overwrites
  /// it.
  Received receive(std::span<char> room);
  /// The next complete message among the bytes received. Throws ProtocolError for inauthentic bytes, invalid headers
  /// and oversized messages; the stream cannot be read afterwards.
  std::optional<WireMessage> next();

  std::string_view header() const noexcept { return reader_.header(); }  ///< see MessageReader
  /// Describes the end of the connection: whether it truncated a message.
  std::string_view end_text() const noexcept;
  Clock::time_point heard() const noexcept { return heard_; }  ///< last arrival of authentic data

  // ---- Writing

  void queue(std::string bytes) { queue(std::make_shared<const std::string>(std::move(bytes))); }
  void queue(std::shared_ptr<const std::string> bytes);
  /// Does not copy the bytes: they must stay valid until flush() has made the stream idle or has failed permanently.
  void queue_borrowed(std::string_view bytes) { append({nullptr, bytes}); }
  /// Sends what the socket accepts, without blocking. Returns 0, or errno if the connection is broken.
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
