// Receives frames from one other rank over one or more streams (see frame.h). Never blocks.
//
// Collectives post memory for each frame, in order; a frame's signature and length are compared with the posted ones
// before its payload is read. Point-to-point messages reverse that: `peek` returns the header, `accept` supplies the
// memory. In both cases the payload is read directly into its memory , and a piece counts only once its checksum has
// been verified. A frame that arrives early stays in the ring or socket, except the few KiB in a socket's read-ahead
// buffer, which let a small frame cost one system call.
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
  /// As a stream: the connection that this rank opened to send frames to that peer.
  static constexpr int kOwnConnection = -1;

  /// For collectives. `open` must not block: it returns null while the sender has not connected that stream, or when
  /// this rank has no connection of its own.
  FrameReceiver(Peer peer, Open open);
  /// For point-to-point messages.
  FrameReceiver(Peer peer, std::unique_ptr<ByteSource> source);

  /// Queues memory for the next frame. The transfer must stay in place until it is done.
  void post(Transfer& transfer) { queue_.push_back(&transfer); }

  /// Returns the next message's header, or null until it has arrived in full. Requires that no transfer is pending.
  /// Throws like `advance`.
  const FrameHeader* peek();
  /// Takes the message that `peek` returned. The transfer must have its length and stay in place until it is done.
  void accept(Transfer& transfer);

  /// Reads what has arrived for the queue, up to about `most` bytes of payload; false if nothing moved. Throws
  /// PeerLost, Mismatch, ProtocolError.
  bool advance(std::size_t most = SIZE_MAX);

  /// Whether `peek` will return a message from shared memory.
  bool arrived() { return offered_ || streams_[0].source->ready() > 0; }
  /// Whether the rest of the message that `peek` returned has arrived, in shared memory.
  bool has_whole() { return !streams_[0].network && streams_[0].source->ready() >= offered_->length; }

  bool pending() const noexcept { return !queue_.empty(); }
  bool local() const noexcept { return streams_[0].source && !streams_[0].network; }
  int fd() const noexcept { return streams_[0].source->fd(); }  ///< stream 0's, once it is open; -1: shared memory
  /// Stream 0's TCP connection, to send on as well; -1: none.
  int connection() const noexcept { return streams_[0].source ? fd() : -1; }
  bool awaits_connection() const noexcept;  ///< the sender has not connected yet
  bool has_read_ahead() const noexcept;     ///< bytes may be buffered although no descriptor is readable
  void add_descriptors(std::vector<pollfd>& descriptors) const;
  std::string progress() const;  ///< "3.0 of 8.0 MiB received"; empty when nothing is pending
  TransferProgress bytes() const { return progress_of(queue_); }
  const Peer& peer() const noexcept { return peer_; }
  void abandon() noexcept { queue_.clear(); }  ///< drops the queue; the receiver is unusable afterwards

 private:
  struct Stream {
    std::unique_ptr<ByteSource> source;
    bool network = false;                // a socket: read ahead to save system calls
    std::unique_ptr<std::byte[]> ahead;  // bytes read but not yet used: [begin, end)
    std::size_t begin = 0;
    std::size_t end = 0;
    std::uint64_t frame = 0;  // number of the stream's current frame
    std::uint64_t piece = 0;  // and of the piece in it
    bool dry = false;         // the socket is drained: another read would be a wasted system call
    bool in_payload = false;  // inside the payload of the segment below
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
  std::optional<FrameHeader> offered_;  // the header of a message not accepted yet
};

}  // namespace maniple
