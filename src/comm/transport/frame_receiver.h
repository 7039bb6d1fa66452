// Receives frames from one other rank, over one or several streams (see frame.h). Never blocks.
//
// Collectives post memory for each frame, in order: the frame's signature and length are compared with the posted ones
// before a byte of the payload is read. Point-to-point messages go the other way: `peek` shows the header, `accept`
// gives the memory. Either way the payload goes straight to its memory, and a piece counts only once its checksum is
// right. A frame that arrives early stays in the ring or socket (but for the few KiB of a socket's read-ahead buffer,
// which lets a small frame cost one system call).
#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/transport/byte_channel.h"
#include "comm/transport/frame.h"
#include "comm/transport/transfer.h"

namespace maniple {

class FrameReceiver {
 public:
  using Open = std::function<std::unique_ptr<ByteSource>(int stream)>;
  static constexpr int kOwnConnection = -1;  ///< as a stream: what this rank opened for its own frames to that sender

  /// Of collectives. `open` does not block: it returns null while the sender has not connected that stream, or where
  /// this rank has no connection of its own.
  FrameReceiver(Peer peer, Open open);
  /// Of point-to-point messages.
  FrameReceiver(Peer peer, std::unique_ptr<ByteSource> source);

  /// Queues memory for the next frame. The transfer must stay in place until it is done.
  void post(Transfer& transfer) { queue_.push_back(&transfer); }

  /// The header of the next message; null until it has arrived whole. Only while none is pending. Throws as `advance`.
  const FrameHeader* peek();
  /// Takes the message that `peek` has shown. The transfer must have its length, and stay in place until it is done.
  void accept(Transfer& transfer);

  /// Reads what has arrived for the queue, `most` bytes of payload or little more; false when that is nothing. Throws
  /// PeerLost, Mismatch, ProtocolError.
  bool advance(std::size_t most = SIZE_MAX);

  /// Whether `peek` will show a message that is in shared memory.
  bool arrived() { return offered_ || streams_[0].source->ready() > 0; }
  /// Whether the rest of the message that `peek` has shown is here, in shared memory.
  bool has_whole() { return !streams_[0].network && streams_[0].source->ready() >= offered_->length; }

  bool pending() const noexcept { return !queue_.empty(); }
  bool local() const noexcept { return streams_[0].source && !streams_[0].network; }
  int fd() const noexcept { return streams_[0].source->fd(); }  ///< of stream 0, once it is open; -1: shared memory
  /// The TCP connection of stream 0, for the other direction; -1: there is none.
  int connection() const noexcept { return streams_[0].source ? fd() : -1; }
  bool awaits_connection() const noexcept;  ///< the sender has not connected yet
  bool has_read_ahead() const noexcept;     ///< there may be bytes although no descriptor is readable
  void add_descriptors(std::vector<pollfd>& descriptors) const;
  std::string progress() const;  ///< "3.0 of 8.0 MiB received"; empty when nothing is pending
  TransferProgress bytes() const { return progress_of(queue_); }
  const Peer& peer() const noexcept { return peer_; }
  void abandon() noexcept { queue_.clear(); }  ///< forgets the queue; it is unusable afterwards

 private:
  struct Stream {
    std::unique_ptr<ByteSource> source;
    bool network = false;                // a socket: read ahead, to make fewer calls
    std::unique_ptr<std::byte[]> ahead;  // bytes read but not yet used: [begin, end)
    std::size_t begin = 0;
    std::size_t end = 0;
    std::uint64_t frame = 0;  // number of the frame that the stream is at
    std::uint64_t piece = 0;  // and the piece in it
    bool dry = false;         // the socket gave all it had: asking again would be a wasted call
    bool in_payload = false;  // of the segment below
    std::byte* to = nullptr;
    std::size_t left = 0;
    std::uint32_t check = 0;
    std::uint32_t expected_check = 0;
  };

  template <class Body>
  auto with_peer_named(Body body);
  bool advance(std::size_t index, std::size_t& budget);
  bool open(std::size_t index);
  void follow_notice();
  static void set_source(Stream& stream, std::unique_ptr<ByteSource> source);
  void skip_frames_without_piece(std::size_t index);
  bool wants_bytes(const Stream& stream) const noexcept;
  bool wants_frame_header(std::size_t index) const noexcept { return index == 0 && streams_[0].frame >= headers_seen_; }
  static std::size_t read(Stream& stream, std::span<const iovec> parts);
  std::size_t missing(const Stream& stream, bool frame) const noexcept;
  static bool read_ahead(Stream& stream, std::size_t missing);
  std::size_t read_piece(Stream& stream);
  std::size_t read_payload(Stream& stream);
  void took_payload(Stream& stream, std::size_t size);
  FrameHeader take_frame_header();
  void check_call(const FrameHeader& header, const Transfer& transfer) const;
  void begin(const FrameHeader& header, Transfer& transfer);
  void take_piece_header(Stream& stream);
  void start_payload(Stream& stream, std::size_t offset, std::size_t size, std::uint32_t expected_check);
  void finish_segment(Stream& stream);
  Transfer& at(std::uint64_t frame) const noexcept { return *queue_[frame - first_]; }

  Peer peer_;
  FrameKind kind_;
  Open open_;
  std::vector<Stream> streams_;
  std::deque<Transfer*> queue_;
  std::uint64_t first_ = 0;             // number of the frame at the front of the queue
  std::uint64_t headers_seen_ = 0;      // frames whose header has been taken
  bool moved_ = false;                  // stream 0 is this rank's own connection
  std::optional<FrameHeader> offered_;  // of a message that has not been accepted yet
};

}  // namespace maniple
