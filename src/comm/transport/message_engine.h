// Point-to-point messages of one group: matches arriving messages with posted receives, and moves many messages at
// once.
//
// A receive is matched by (source, tag) in the order posted; messages between two ranks with the same tag arrive in the
// order sent. A send that waits behind an unfinished one is copied and reported as done, while there is room for
// copies. An *unexpected* message arrives before its receive was posted and ahead of an awaited one; it is buffered, up
// to a limit. A waiting thread drives the engine itself; a background thread, started when first needed, drives
// messages without a waiter. Connections are dialled in threads of their own, a few at a time, so no message waits for
// another's connection. Each round moves a bounded number of bytes and then checks the deadlines and the abort, so
// neither is delayed by other traffic. An abort ends the engine for good, as it leaves connections in the middle of
// frames.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/abort_signal.h"
#include "comm/shm/waiter.h"
#include "comm/transport/background_dial.h"
#include "comm/transport/byte_channel.h"
#include "comm/transport/connector.h"
#include "comm/transport/frame_receiver.h"
#include "comm/transport/frame_sender.h"
#include "comm/transport/message.h"
#include "comm/transport/message_slots.h"
#include "comm/transport/tcp_channel.h"

namespace maniple {

struct MessageEngineOptions {
  std::string topic;  ///< names its connections, "world/0:m": the same on all ranks, unique in the job
  int rank = 0;
  std::vector<int> global_ranks;
  Connector* connector = nullptr;  ///< may be null when all ranks are local
  AbortSignal* abort = nullptr;
  std::size_t unexpected_limit = std::size_t{1} << 30;

  /// Open a ring to or from a rank of this host; return null for pairs that use TCP. May be empty.
  std::function<std::unique_ptr<ByteSink>(int rank)> local_sink;
  std::function<std::unique_ptr<ByteSource>(int rank)> local_source;
  /// Open the slots for small messages to or from a rank; null for pairs without. May be empty.
  std::function<std::unique_ptr<MessageSlots>(int rank)> slots_to;
  std::function<std::unique_ptr<MessageSlots>(int rank)> slots_from;
  /// Counts this rank's notifications: it grows when a local ring may have moved. Empty without rings.
  std::function<std::uint32_t()> notifications;
  std::function<void(std::uint32_t seen, Deadline)> await_notification;
  std::function<void()> notify_self;
  Waiter* waiter = nullptr;  ///< how try_now waits for a message; null: it does not wait
  /// How a rank left the group; unknown: it has not left. May be empty.
  std::function<LossKind(int rank)> departure_of;
  /// Why another rank of this host aborted the group; null: none has. May be empty.
  std::function<std::exception_ptr()> aborted_by_peer;
};

class MessageEngine {
 public:
  explicit MessageEngine(MessageEngineOptions options);
  ~MessageEngine();  ///< pending messages fail with Aborted

  /// Sends or receives a small message in the calling thread, bypassing all queues. Works only between ranks of one
  /// host, when no other transfer with that rank is in progress and , for a receive, the message arrives soon. Returns
  /// false if nothing was done.
  bool try_now(Message& message);
  /// Starts the messages together. With `background`, a thread finishes them even without a waiter.
  void start(std::span<const std::shared_ptr<Message>> messages, bool background);
  /// Drives the engine until the message is done; failures are in `message.error`.
  void drive(Message& message);
  /// For reports. Empty while another thread holds the engine's lock.
  AwaitedMessages awaited();

 private:
  struct Unexpected {
    DType dtype;
    int tag;
    std::vector<std::byte> bytes;
  };
  struct PeerState {
    std::unique_ptr<BackgroundDial> dial;  // dials the connection for `sender`
    std::unique_ptr<FrameSender> sender;
    std::unique_ptr<FrameReceiver> receiver;
    std::unique_ptr<MessageSlots> slots_out;
    std::unique_ptr<MessageSlots> slots_in;
    std::uint32_t frames_out = 0;  // frames sent by `sender` and received by `receiver`
    std::uint32_t frames_in = 0;
    std::deque<std::shared_ptr<Message>> sends;
    bool sending = false;  // the first of `sends` is being sent, as `outgoing`
    Transfer outgoing;
    std::shared_ptr<Message> followed;      // sent; done once the copies queued behind it are sent, too
    std::size_t copied_bytes = 0;           // size of the copies in `sends`, with their headers
    std::shared_ptr<Message> receiving;     // `incoming` goes to this message's memory,
    std::unique_ptr<Unexpected> buffering;  // or to this buffer
    Transfer incoming;
    std::list<Unexpected> unexpected;  // complete messages, oldest first
    std::exception_ptr broken;
    LossKind gone = LossKind::unknown;  // how the peer had left when last checked; unknown: it had not
  };

  static constexpr int kAnyone = -1;

  using Lock = std::unique_lock<std::mutex>;
  static bool send_now(PeerState& peer, const Message& message);
  bool copy_aside(const Message& message);
  void finish_sent(PeerState& peer, const std::shared_ptr<Message>& message);
  bool receive_now(PeerState& peer, const Message& message);
  bool progress(Lock& lock);  // returns whether anything moved
  bool progress_sends(int rank);
  bool progress_receives(int rank);
  bool open_outgoing(int rank);
  bool open_incoming(int rank);
  void accept_message(int rank, const FrameHeader& header);
  bool take_slot(int rank);
  void reserve_unexpected(int rank, int tag, std::size_t bytes);
  bool take_unexpected();
  std::shared_ptr<Message> match(int rank, DType dtype, int tag, std::size_t bytes);
  void finish(const std::shared_ptr<Message>& message, std::exception_ptr error);
  void fail_expired(bool moved);
  std::exception_ptr gave_up(const Message& message, int rank, const std::string& why, LossKind loss) const;
  void fail_all(const std::exception_ptr& cause);
  void fail_peer(int rank, const std::exception_ptr& cause);
  bool expects_from(int rank) const;
  void run_finished(Lock& lock);
  void idle(Lock& lock, std::uint32_t seen, Deadline limit);
  void wake_sleepers() const;
  void background();
  Peer peer_of(int rank) const { return {rank, options_.global_ranks[rank]}; }
  std::string name_of(int rank) const { return peer_of(rank).name(); }
  PeerState& state(int rank) { return peers_[rank]; }

  MessageEngineOptions options_;
  TcpChannelOptions channel_options_ = tcp_channel_options();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<PeerState> peers_;
  std::list<std::shared_ptr<Message>> receives_;  // posted but not matched, in order
  std::vector<std::shared_ptr<Message>> just_done_;
  std::size_t unexpected_bytes_ = 0;
  std::size_t unexpected_count_ = 0;  // complete messages from all peers
  std::vector<std::shared_ptr<Message>> in_background_;
  bool stopping_ = false;
  AbortSignal ended_;  // raised by an abort or the destructor; later messages fail
  UniqueFd wake_fd_;   // an eventfd, for threads that sleep in poll
  std::thread thread_;
};

}  // namespace maniple
