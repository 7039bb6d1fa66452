// Sends frames from this rank to one other over one or more streams (see frame.h). Blocks only to connect.
//
// A payload of up to 256 KiB (for a message: 4 KiB) is sent whole on stream 0; a longer one is sent in pieces on all
// streams, each at its own pace. A ring in shared memory is one stream, without checksums or pieces. Streams are opened
// when first needed, so pairs that exchange only small payloads have one connection.
#pragma once

#include <poll.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/byte_channel.h"
#include "comm/transport/frame.h"
#include "comm/transport/transfer.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class FrameSender {
 public:
  using Open = std::function<std::unique_ptr<ByteSink>(int stream, Deadline deadline)>;

  /// For collectives. `open` may block until the deadline. `streams` is the maximum number of streams.
  FrameSender(Peer peer, int streams, Open open);
  /// For point-to-point messages.
  FrameSender(Peer peer, std::unique_ptr<ByteSink> sink);

  /// Queues a frame and opens the streams it needs. The transfer must stay in place until it is done.
  void post(Transfer& transfer, Deadline deadline);

  /// Sends later frames through `sink`; a notice on the old connection announces the change to the receiver (see
  /// mesh.h). Only for collectives over TCP, once, while nothing is pending.
  void move_to(std::unique_ptr<ByteSink> sink);
  bool can_move() const noexcept { return network_ && !authenticates_ && !moved_ && queue_.empty(); }

  /// Writes what the streams take now, up to about `most` bytes; false if nothing moved. Throws PeerLost.
  bool advance(std::size_t most = SIZE_MAX);

  /// Whether a message of `size` bytes fits into shared memory now.
  bool takes_whole(std::size_t size) {
    return queue_.empty() && !network_ && streams_[0].sink->room() >= kFrameHeaderBytes + size;
  }

  std::size_t capacity() const noexcept { return streams_[0].sink->capacity(); }  ///< once stream 0 is open
  bool pending() const noexcept { return !queue_.empty(); }
  bool local() const noexcept { return !streams_.empty() && !network_; }
  int fd() const noexcept { return streams_[0].sink->fd(); }  ///< stream 0's, once it is open; -1: shared memory
  /// Stream 0's TCP connection, to receive on as well; -1: none, or it is encrypted.
  int connection() const noexcept { return streams_.empty() || authenticates_ ? -1 : fd(); }
  void add_descriptors(std::vector<pollfd>& descriptors) const;  ///< of streams with data to write
  std::string progress() const;                                  ///< "3.0 of 8.0 MiB sent"
  TransferProgress bytes() const { return progress_of(queue_); }
  const Peer& peer() const noexcept { return peer_; }
  void abandon() noexcept { queue_.clear(); }  ///< drops the queue; the sender is unusable afterwards

 private:
  // A segment is a stream's unit of writing: headers, then one piece (or the whole payload).
  struct Stream {
    std::unique_ptr<ByteSink> sink;
    std::uint64_t frame = 0;  // number of the stream's current frame
    std::uint64_t piece = 0;  // and of the piece in it
    bool loaded = false;      // the segment below is partly written
    std::array<std::byte, kMaxHeaderBytes + kPieceHeaderBytes> headers;
    std::size_t headers_size = 0;
    std::size_t headers_done = 0;
    const std::byte* payload = nullptr;
    std::size_t payload_left = 0;
  };

  void open_next(Deadline deadline);
  void add_stream(std::unique_ptr<ByteSink> sink);
  bool advance(std::size_t index, std::size_t& budget);
  std::size_t write(Stream& stream, std::span<const iovec> parts) const;
  bool send_notice();
  bool find_segment(std::size_t index);
  void load_segment(std::size_t index);
  void finish_segment(std::size_t index);
  Transfer& at(std::uint64_t frame) noexcept { return *queue_[frame - first_]; }

  Peer peer_;
  FrameKind kind_;
  int most_streams_;
  Open open_;
  bool network_ = false;        // of the open streams
  bool authenticates_ = false;  // likewise
  bool checks_ = false;         // likewise
  bool moved_ = false;
  std::unique_ptr<ByteSink> next_sink_;  // replaces stream 0's once the notice in its headers has been written
  std::vector<Stream> streams_;
  std::deque<Transfer*> queue_;
  std::uint64_t first_ = 0;  // number of the frame at the front of the queue
};

}  // namespace maniple
