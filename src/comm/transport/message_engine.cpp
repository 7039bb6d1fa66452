#include "comm/transport/message_engine.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/threads.h"
#include "comm/transport/sealed_channel.h"

namespace maniple {
namespace {

// Maximum concurrent dials: the peer's acceptor refuses some of too many at once.
constexpr int kDialsAtOnce = 8;
// Limits of one peer's turn, in messages and bytes, before the next peer's.
constexpr int kMessagesAtOnce = 64;
constexpr std::size_t kBytesAtOnce = std::size_t{8} << 20;

}  // namespace

MessageEngine::MessageEngine(MessageEngineOptions options)
    : options_(std::move(options)), peers_(options_.global_ranks.size()), wake_fd_(new_event()) {}

MessageEngine::~MessageEngine() {
  {
    Lock lock(mutex_);
    stopping_ = true;
    fail_all(std::make_exception_ptr(Aborted("the group was destroyed")));
    run_finished(lock);
  }
  wake_.notify_all();
  wake_sleepers();
  if (thread_.joinable()) thread_.join();
  for (PeerState& peer : peers_) peer.dial.reset();
}

void MessageEngine::wake_sleepers() const {
  ::eventfd_write(wake_fd_.get(), 1);
  if (options_.notify_self) options_.notify_self();
}

void MessageEngine::start(std::span<const std::shared_ptr<Message>> messages, bool background) {
  Lock lock(mutex_);
  for (const auto& message : messages) {
    if (message->op == Op::send) {
      state(message->peer).sends.push_back(message);
    } else {
      receives_.push_back(message);
    }
    if (background) in_background_.push_back(message);
  }
  progress(lock);
  run_finished(lock);
  std::erase_if(in_background_, [](const auto& message) { return message->done.load(); });
  if (in_background_.empty()) return;
  if (!thread_.joinable()) thread_ = start_thread("messages", [this] { this->background(); });
  wake_.notify_all();
  wake_sleepers();
}

void MessageEngine::drive(Message& message) {
  Lock lock(mutex_);
  while (!message.done.load(std::memory_order_acquire)) {
    const std::uint32_t seen = options_.notifications ? options_.notifications() : 0;
    const bool moved = progress(lock);
    run_finished(lock);
    if (moved || message.done.load(std::memory_order_acquire)) continue;
    if (copy_aside(message)) {
      run_finished(lock);
      continue;
    }
    message.asleep = true;
    idle(lock, seen, message.deadline);
    message.asleep = false;
  }
}

AwaitedMessages MessageEngine::awaited() {
  AwaitedMessages result;
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock) return result;
  const auto consider = [&result](const std::shared_ptr<Message>& message) {
    if (!message || (message->waiters && *message->waiters == 0)) return;
    result.more += result.oldest ? 1 : 0;
    if (!result.oldest || message->since < result.oldest->since) result.oldest = message;
  };
  for (const auto& message : receives_) consider(message);
  for (const PeerState& peer : peers_) {
    for (const auto& message : peer.sends) consider(message);
    consider(peer.followed);
    consider(peer.receiving);
  }
  return result;
}

void MessageEngine::background() {
  on_group_thread = true;
  Lock lock(mutex_);
  while (!stopping_) {
    std::erase_if(in_background_, [](const auto& message) { return message->done.load(); });
    if (in_background_.empty()) {
      wake_.wait(lock);
      continue;
    }
    const std::uint32_t seen = options_.notifications ? options_.notifications() : 0;
    const bool moved = progress(lock);
    run_finished(lock);
    if (moved || stopping_) continue;
    Deadline soonest;
    for (const auto& message : in_background_) soonest = Deadline::sooner(soonest, message->deadline);
    idle(lock, seen, soonest);
  }
}

// Callbacks run without the lock, as they may start new messages.
void MessageEngine::run_finished(Lock& lock) {
  while (!just_done_.empty()) {
    auto done = std::move(just_done_);
    just_done_.clear();
    const bool awaited = std::any_of(done.begin(), done.end(), [](const auto& message) { return message->asleep; });
    lock.unlock();
    for (const auto& message : done) {
      auto finished = std::move(message->finished);
      message->done.store(true, std::memory_order_release);
      if (finished) finished();
    }
    if (awaited) wake_sleepers();
    lock.lock();
    wake_.notify_all();
    if (just_done_.capacity() == 0) {  // reuse the memory
      done.clear();
      just_done_.swap(done);
    }
  }
}

bool MessageEngine::progress(Lock&) {
  if (ended_.raised()) {
    fail_all(ended_.cause());
    return !just_done_.empty();
  }
  // Read before the round: messages that have arrived by then count.
  std::exception_ptr aborted = options_.abort->raised() ? options_.abort->cause() : nullptr;
  if (!aborted && options_.aborted_by_peer) aborted = options_.aborted_by_peer();
  // Read before receiving, so that messages a rank sent before it left are received first.
  for (int rank = 0; options_.departure_of && rank < static_cast<int>(peers_.size()); ++rank) {
    state(rank).gone = options_.departure_of(rank);
  }
  bool moved = take_unexpected();
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    PeerState& peer = state(rank);
    if (peer.broken) {
      const std::size_t before = just_done_.size();
      fail_peer(rank, peer.broken);
      moved |= just_done_.size() != before;
      continue;
    }
    try {
      if (!peer.sends.empty()) moved |= progress_sends(rank);
      if (expects_from(rank)) moved |= progress_receives(rank);
    } catch (const SystemError& error) {
      fail_peer(rank, std::make_exception_ptr(peer_of(rank).lost("", error)));
      moved = true;
    } catch (const Error&) {
      fail_peer(rank, std::current_exception());
      moved = true;
    }
  }
  if (aborted) {
    fail_all(aborted);
    return true;
  }
  fail_expired(moved);
  return moved || !just_done_.empty();
}

bool MessageEngine::progress_sends(int rank) {
  PeerState& peer = state(rank);
  bool moved = false;
  while (!peer.sends.empty()) {
    const auto message = peer.sends.front();
    try {
      if (!open_outgoing(rank)) return moved;
    } catch (const SystemError&) {  // no descriptor or thread available here: not the peer's fault
      fail_peer(rank, std::current_exception());
      return true;
    }
    if (!std::exchange(peer.sending, true)) {
      peer.outgoing = {};
      peer.outgoing.dtype = message->dtype;
      peer.outgoing.tag = message->tag;
      peer.outgoing.from = message->data;
      peer.outgoing.size = message->bytes;
      peer.sender->post(peer.outgoing, Deadline::never());
      ++peer.frames_out;
    }
    moved |= peer.sender->advance(kBytesAtOnce);
    message->moved = peer.outgoing.moved;
    if (!peer.outgoing.done) return moved;
    peer.sends.pop_front();
    peer.sending = false;
    finish_sent(peer, message);
    moved = true;
  }
  return moved;
}

bool MessageEngine::open_outgoing(int rank) {
  PeerState& peer = state(rank);
  if (peer.sender) return true;
  if (peer.dial) {
    if (!peer.dial->done()) return false;
    peer.sender = std::make_unique<FrameSender>(peer_of(rank), make_data_sink(peer.dial->take(), channel_options_));
    peer.dial.reset();
    return true;
  }
  if (auto sink = options_.local_sink ? options_.local_sink(rank) : nullptr) {
    peer.sender = std::make_unique<FrameSender>(peer_of(rank), std::move(sink));
    if (options_.slots_to) peer.slots_out = options_.slots_to(rank);
    return true;
  }
  const auto dials =
      std::count_if(peers_.begin(), peers_.end(), [](const PeerState& p) { return p.dial && !p.dial->done(); });
  if (dials >= kDialsAtOnce) return false;
  // No deadline: the connection serves all messages, whose deadlines differ.
  peer.dial = std::make_unique<BackgroundDial>(
      [this, global = peer_of(rank).global_rank] {
        return options_.connector->dial(global, options_.topic, Deadline::never(), ended_);
      },
      [this] { wake_sleepers(); });
  return false;
}

bool MessageEngine::expects_from(int rank) const {
  const PeerState& peer = peers_[rank];
  if (peer.broken) return false;
  if (peer.receiving || peer.buffering) return true;
  return std::any_of(receives_.begin(), receives_.end(),
                     [rank](const auto& message) { return message->peer == rank || message->peer == kAnyone; });
}

bool MessageEngine::open_incoming(int rank) {
  PeerState& peer = state(rank);
  if (peer.receiver) return true;
  auto source = options_.local_source ? options_.local_source(rank) : nullptr;
  if (source && options_.slots_from) peer.slots_in = options_.slots_from(rank);
  if (!source) {
    SecureConnection connection = options_.connector->try_take(peer_of(rank).global_rank, options_.topic);
    if (!connection) return false;
    source = make_data_source(std::move(connection), channel_options_);
  }
  peer.receiver = std::make_unique<FrameReceiver>(peer_of(rank), std::move(source));
  return true;
}

bool MessageEngine::progress_receives(int rank) {
  PeerState& peer = state(rank);
  if (!open_incoming(rank)) return false;
  bool moved = false;
  for (int messages = 0; messages < kMessagesAtOnce && expects_from(rank); ++messages) {
    if (!peer.receiving && !peer.buffering) {
      if (take_slot(rank)) {
        moved = true;
        continue;
      }
      const FrameHeader* header = nullptr;
      std::exception_ptr closed;
      try {
        header = peer.receiver->peek();
      } catch (const PeerLost&) {
        closed = std::current_exception();
      }
      // Checked again: the slot may have been filled before the frame, or the end of stream, that is visible now.
      if (take_slot(rank)) {
        moved = true;
        continue;
      }
      if (closed) std::rethrow_exception(closed);
      if (header == nullptr) return moved;
      accept_message(rank, *header);
      moved = true;
    }
    moved |= peer.receiver->advance(kBytesAtOnce);
    if (peer.receiving) peer.receiving->moved = peer.incoming.moved;
    if (!peer.incoming.done) return moved;
    moved = true;
    if (peer.receiving) {
      peer.receiving->source = rank;
      finish(std::exchange(peer.receiving, nullptr), nullptr);
    } else {
      peer.unexpected.push_back(std::move(*peer.buffering));
      ++unexpected_count_;
      peer.buffering.reset();
      moved |= take_unexpected();
    }
  }
  return moved;
}

// Directs an arrived message to the first matching receive, or into a buffer.
void MessageEngine::accept_message(int rank, const FrameHeader& header) {
  PeerState& peer = state(rank);
  std::byte* to = nullptr;
  if (auto message = match(rank, header.dtype, header.tag, header.length)) {
    to = message->data;
    peer.receiving = std::move(message);
  } else {
    reserve_unexpected(rank, header.tag, header.length);
    peer.buffering =
        std::make_unique<Unexpected>(Unexpected{header.dtype, header.tag, std::vector<std::byte>(header.length)});
    to = peer.buffering->bytes.data();
  }
  peer.incoming = {};
  peer.incoming.dtype = header.dtype;
  peer.incoming.tag = header.tag;
  peer.incoming.to = to;
  peer.incoming.size = header.length;
  peer.receiver->accept(peer.incoming);
  ++peer.frames_in;
}

void MessageEngine::reserve_unexpected(int rank, int tag, std::size_t bytes) {
  if (bytes > options_.unexpected_limit - std::min(options_.unexpected_limit, unexpected_bytes_)) {
    throw ProtocolError(
        fmt::format("too many unexpected messages from {}: {} bytes are buffered, {} more of tag {} do not fit; "
                    "post their receives earlier or raise MANIPLE_UNEXPECTED_MIB",
                    name_of(rank), unexpected_bytes_, bytes, tag));
  }
  unexpected_bytes_ += bytes;
}

// Removes the matching receive from the list and returns it; null: none. If that receive expects another dtype or size,
// fails it and throws Mismatch.
std::shared_ptr<Message> MessageEngine::match(int rank, DType dtype, int tag, std::size_t bytes) {
  const auto it = std::find_if(receives_.begin(), receives_.end(), [&](const auto& message) {
    return (message->peer == rank || message->peer == kAnyone) && message->tag == tag;
  });
  if (it == receives_.end()) return nullptr;
  auto message = std::move(*it);
  receives_.erase(it);
  if (message->dtype == dtype && message->bytes == bytes) return message;
  const std::string expected =
      fmt::format("{}[{}]", to_string(message->dtype), message->bytes / size_of(message->dtype));
  ErrorInfo info;
  info.calls = {
      {.rank = peer_of(rank).global_rank, .call = Signature::of_message(dtype, tag, bytes).describe()},
      {.rank = peer_of(options_.rank).global_rank, .call = fmt::format("recv {} tag {}", expected, message->tag)}};
  info.reason = fmt::format("{} sent {}[{}] with tag {} where {} is received", name_of(rank), to_string(dtype),
                            bytes / size_of(dtype), tag, expected);
  const Mismatch error(std::move(info));
  finish(message, std::make_exception_ptr(error));
  throw error;
}

// Completes receives from buffered messages, oldest first.
bool MessageEngine::take_unexpected() {
  if (unexpected_count_ == 0) return false;
  bool moved = false;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    PeerState& peer = state(rank);
    for (auto it = peer.unexpected.begin(); it != peer.unexpected.end();) {
      std::shared_ptr<Message> message;
      try {
        message = match(rank, it->dtype, it->tag, it->bytes.size());
      } catch (const Mismatch&) {
        unexpected_bytes_ -= it->bytes.size();
        peer.unexpected.erase(it);
        --unexpected_count_;
        fail_peer(rank, std::current_exception());
        return true;
      }
      if (!message) {
        ++it;
        continue;
      }
      std::copy(it->bytes.begin(), it->bytes.end(), message->data);
      message->moved = it->bytes.size();
      message->source = rank;
      unexpected_bytes_ -= it->bytes.size();
      it = peer.unexpected.erase(it);
      --unexpected_count_;
      finish(message, nullptr);
      moved = true;
    }
  }
  return moved;
}

void MessageEngine::finish(const std::shared_ptr<Message>& message, std::exception_ptr error) {
  message->error = std::move(error);
  just_done_.push_back(message);
}

void MessageEngine::idle(Lock& lock, std::uint32_t seen, Deadline limit) {
  std::vector<pollfd> waiting;
  bool rings = false;
  bool awaits_connection = false;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const PeerState& peer = peers_[rank];
    if (rank == options_.rank) continue;  // the ring to itself moves only when this engine runs
    if (!peer.sends.empty() && peer.sender) {
      if (peer.sender->fd() >= 0) waiting.push_back({peer.sender->fd(), POLLOUT, 0});
      rings |= peer.sender->fd() < 0;
    }
    if (!expects_from(rank)) continue;
    if (peer.receiver && peer.receiver->fd() >= 0) waiting.push_back({peer.receiver->fd(), POLLIN, 0});
    rings |= peer.receiver && peer.receiver->fd() < 0;
    awaits_connection |= !peer.receiver;
  }
  const Deadline until = Deadline::sooner(limit, Deadline::after(WaitPolicy::kLongestSleep));
  if (waiting.empty() && !awaits_connection && rings) {
    lock.unlock();
    options_.await_notification(seen, until);
    lock.lock();
    return;
  }
  if (awaits_connection && options_.connector != nullptr)
    waiting.push_back({options_.connector->arrival_fd(), POLLIN, 0});
  waiting.push_back({options_.abort->fd(), POLLIN, 0});
  waiting.push_back({wake_fd_.get(), POLLIN, 0});
  lock.unlock();
  // Rings have no descriptor: alongside sockets they are checked every millisecond.
  const int limit_ms = rings ? 1 : std::max(1, until.poll_ms());
  ::poll(waiting.data(), waiting.size(), limit_ms);
  lock.lock();
  eventfd_t count = 0;
  ::eventfd_read(wake_fd_.get(), &count);
}

}  // namespace maniple
