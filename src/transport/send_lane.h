// The frames from this rank to one other, over one or several streams.
//
// A message of up to 256 KiB leaves whole on stream 0. A longer one is cut into pieces that leave on the streams in
// turn (see frame.h), each stream at its own pace. A ring in shared memory is a single stream without checksums, and
// nothing is cut. Streams are opened when first needed, so pairs that exchange only small messages have one connection.
#pragma once

#include <poll.h>

#include <array>
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
#include <maniple/comm/deadline.h>

namespace maniple {

class SendLane {
 public:
  using Open = std::function<std::unique_ptr<ByteSink>(int stream, Deadline deadline)>;

  /// `open` may block until the deadline. `streams` is how many it can open.
  SendLane(Peer peer, int streams, Open open);

  /// Queues a message; opens the streams that it needs. The transfer must stay in place until it is done.
  void post(Transfer& transfer, Deadline deadline);

  /// Writes what the streams take now; false when that is nothing. Throws PeerLost.
  bool advance();

  bool pending() const noexcept { return !queue_.empty(); }
  bool local() const noexcept { return !streams_.empty() && streams_[0].sink->fd() < 0; }
  void add_descriptors(std::vector<pollfd>& descriptors) const;  ///< of streams that have something to write
  std::string progress() const;                                  ///< "3.0 of 8.0 MiB sent"
  const Peer& peer() const noexcept { return peer_; }
  void abandon() noexcept { queue_.clear(); }  ///< forgets the queue; the lane is unusable afterwards

 private:
  // A segment is what one stream writes in one go: headers, then one piece (or the whole payload).
  struct Stream {
    std::unique_ptr<ByteSink> sink;
    std::uint64_t message = 0;  // number of the message that the stream is at
    std::uint64_t piece = 0;    // and the piece in it
    bool loaded = false;        // the segment below is partly written
    std::array<std::byte, kFrameHeaderBytes + kPieceHeaderBytes> headers;
    std::size_t headers_size = 0;
    std::size_t headers_done = 0;
    const std::byte* payload = nullptr;
    std::size_t payload_left = 0;
  };

  bool advance(std::size_t index);
  bool find_segment(std::size_t index);
  void load_segment(std::size_t index);
  void finish_segment(std::size_t index);
  Transfer& at(std::uint64_t message) noexcept { return *queue_[message - first_]; }

  Peer peer_;
  int most_streams_;
  Open open_;
  std::vector<Stream> streams_;
  std::deque<Transfer*> queue_;
  std::uint64_t first_ = 0;  // number of the message at the front of the queue
};

}  // namespace maniple
