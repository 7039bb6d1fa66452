// The connections that carry one group's collectives: for each pair of ranks and direction, a FrameSender at one end
// and a FrameReceiver at the other.
//
// Each connection is opened by its sender when first used, so neither rank waits for the other. Pairs on one host use
// rings in shared memory when the group has them, other pairs TCP. Once a pair has TCP connections in both directions,
// the higher rank *moves*: it sends a notice as the last frame on its own connection, and later frames on the
// connection that it receives from. Acknowledgements then ride on the data in the other direction and need no packets
// of their own, which saves a quarter of the time of a small all_reduce. (Encrypted connections have keys for one
// direction and never move.)
#pragma once

#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/base/abort_signal.h"
#include "comm/shm/waiter.h"
#include "comm/transport/byte_channel.h"
#include "comm/transport/connector.h"
#include "comm/transport/frame_receiver.h"
#include "comm/transport/frame_sender.h"
#include "comm/transport/tcp_channel.h"
#include <maniple/comm/deadline.h>

namespace maniple {

struct MeshOptions {
  std::string topic;              ///< names its connections, "world/0:c": the same on all ranks, unique in the job
  int rank = 0;                   ///< this rank in the group
  std::vector<int> global_ranks;  ///< indexed by group rank
  Connector* connector = nullptr;
  AbortSignal* abort = nullptr;
  int streams = 2;                  ///< TCP connections for each pair and direction
  WaitPolicy waiting{.yield = {}};  ///< for TCP

  /// Open a ring in shared memory to or from a rank of this host; return null for pairs that use TCP. May be empty.
  std::function<std::unique_ptr<ByteSink>(int rank)> local_sink;
  std::function<std::unique_ptr<ByteSource>(int rank)> local_source;
  /// Sleeps until a local ring may have moved, at most until the deadline. Empty without rings.
  std::function<void(Deadline)> local_wait;
};

/// Used by one Exchange at a time.
class Mesh {
 public:
  explicit Mesh(MeshOptions options);
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;
  int rank() const noexcept { return options_.rank; }
  int size() const noexcept { return static_cast<int>(options_.global_ranks.size()); }

 private:
  friend class Exchange;
  Peer peer(int rank) const { return {rank, options_.global_ranks[rank]}; }
  FrameSender& sender(int rank);
  FrameReceiver& receiver(int rank);
  void move(int rank);
  std::span<std::byte> scratch(std::size_t bytes);

  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };

  MeshOptions options_;
  TcpChannelOptions channel_options_;
  Waiter waiter_;
  std::vector<std::unique_ptr<FrameSender>> senders_;
  std::vector<std::unique_ptr<FrameReceiver>> receivers_;
  std::deque<Transfer> transfers_;  // of the current exchange; senders and receivers point into it
  bool busy_ = false;               // an exchange is in progress
  std::string broken_;              // why no further exchange is possible: a connection is in the middle of a frame
  std::unique_ptr<std::byte, Free> scratch_;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace maniple
