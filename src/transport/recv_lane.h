// The frames from one other rank to this one, over one or several streams.
//
// Only posted messages are read: a frame that came early stays in the socket (but for the few KiB of the read-ahead
// buffer, which lets a small frame cost one system call). A payload goes straight into the posted memory. Its length is
// compared with the posted one before a byte of it is read, and a piece counts only once its checksum is right.
#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/byte_channel.h"
#include "transport/frame.h"
#include "transport/peer.h"
#include "transport/transfer.h"

namespace maniple {

class RecvLane {
 public:
  using Open = std::function<std::unique_ptr<ByteSource>(int stream)>;

  /// `open` does not block: it returns null while the sender has not connected that stream.
  RecvLane(Peer peer, Open open);

  /// Queues memory for the next message. The transfer must stay in place until it is done.
  void post(Transfer& transfer) { queue_.push_back(&transfer); }

  /// Reads what is there; false when that is nothing. Throws PeerLost, Mismatch, ProtocolError.
  bool advance();

  bool pending() const noexcept { return !queue_.empty(); }
  bool local() const noexcept { return !streams_.empty() && streams_[0].source && streams_[0].source->fd() < 0; }
  bool awaits_connection() const noexcept;  ///< the sender has not dialled yet
  bool has_read_ahead() const noexcept;     ///< there may be work that no descriptor tells of
  void add_descriptors(std::vector<pollfd>& descriptors) const;
  std::string progress() const;  ///< "3.0 of 8.0 MiB received"
  const Peer& peer() const noexcept { return peer_; }
  void abandon() noexcept { queue_.clear(); }

 private:
  struct Stream {
    std::unique_ptr<ByteSource> source;
    std::unique_ptr<std::byte[]> ahead;  // bytes read but not yet used: [begin, end)
    std::size_t begin = 0;
    std::size_t end = 0;
    std::uint64_t message = 0;  // number of the message that the stream is at
    std::uint64_t piece = 0;    // and the piece in it
    bool dry = false;           // the socket gave all it had: asking again would be a wasted call
    bool in_payload = false;    // of the segment below
    std::byte* to = nullptr;
    std::size_t left = 0;
    std::uint32_t check = 0;
    std::uint32_t expected_check = 0;
  };

  bool advance(std::size_t index);
  void skip_messages_without_piece(std::size_t index);
  bool wants_bytes(const Stream& stream) const noexcept;
  bool wants_frame_header(std::size_t index) const noexcept {
    return index == 0 && streams_[0].message >= headers_seen_;
  }
  static std::size_t read(Stream& stream, std::span<const iovec> parts);
  bool read_ahead(Stream& stream);
  bool read_payload(Stream& stream);
  void took_payload(Stream& stream, std::size_t size);
  void take_frame_header();
  void take_piece_header(Stream& stream);
  void start_payload(Stream& stream, std::size_t offset, std::size_t size, std::uint32_t expected_check);
  void finish_segment(Stream& stream);
  Transfer& at(std::uint64_t message) const noexcept { return *queue_[message - first_]; }

  Peer peer_;
  Open open_;
  std::vector<Stream> streams_;
  std::deque<Transfer*> queue_;
  std::uint64_t first_ = 0;         // number of the message at the front of the queue
  std::uint64_t headers_seen_ = 0;  // messages whose header has come
};

}  // namespace maniple
