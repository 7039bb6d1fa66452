#include "transport/message_engine.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>

#include <fmt/format.h>

#include "base/check.h"
#include "base/group_thread.h"
#include "base/start_thread.h"
#include "base/system_error.h"
#include "transport/sealed_channel.h"

namespace maniple {
namespace {

// Connections that are dialled at a time: many that come at once are turned away by the other side's acceptor.
constexpr int kDialsAtOnce = 8;
// Messages that are taken from a peer before the others have their turn.
constexpr int kMessagesAtOnce = 64;

}  // namespace

MessageEngine::MessageEngine(MessageEngineOptions options)
    : options_(std::move(options)), peers_(options_.global_ranks.size()), nudge_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!nudge_) throw_system_error("eventfd");
}

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
  for (Peer& peer : peers_) peer.dial.reset();
}

void MessageEngine::wake_sleepers() const {
  ::eventfd_write(nudge_.get(), 1);
  if (options_.ring_own_bell) options_.ring_own_bell();
}

std::string MessageEngine::name_of(int rank) const {
  const int global = options_.global_ranks[static_cast<std::size_t>(rank)];
  return global == rank ? fmt::format("rank {}", rank) : fmt::format("rank {} (global rank {})", rank, global);
}

void MessageEngine::start(std::span<const std::shared_ptr<Message>> messages, bool background) {
  Lock lock(mutex_);
  for (const auto& message : messages) {
    if (message->op == Op::send) {
      peers_[static_cast<std::size_t>(message->peer)].sends.push_back(message);
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
    const std::uint32_t bell = options_.bell ? options_.bell() : 0;
    const bool moved = progress(lock);
    run_finished(lock);
    if (moved || message.done.load(std::memory_order_acquire)) continue;
    message.asleep = true;
    idle(lock, bell, message.deadline);
    message.asleep = false;
  }
}

AwaitedMessages MessageEngine::awaited() {
  AwaitedMessages result;
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock) return result;
  const auto look = [&result](const std::shared_ptr<Message>& message) {
    if (!message || (message->waiters && *message->waiters == 0)) return;
    result.more += result.oldest ? 1 : 0;
    if (!result.oldest || message->since < result.oldest->since) result.oldest = message;
  };
  for (const auto& message : receives_) look(message);
  for (const Peer& peer : peers_) {
    for (const auto& message : peer.sends) look(message);
    look(peer.receiving);
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
    const std::uint32_t bell = options_.bell ? options_.bell() : 0;
    const bool moved = progress(lock);
    run_finished(lock);
    if (moved || stopping_) continue;
    Deadline soonest;
    for (const auto& message : in_background_) soonest = Deadline::sooner(soonest, message->deadline);
    idle(lock, bell, soonest);
  }
}

// Callbacks run without the lock: they may start new messages.
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
  }
}

bool MessageEngine::progress(Lock&) {
  if (ended_.raised()) {
    fail_all(ended_.cause());
    return !just_done_.empty();
  }
  // Looked up before the round: what has arrived by then counts.
  std::exception_ptr aborted = options_.abort->raised() ? options_.abort->cause() : nullptr;
  if (!aborted && options_.aborted_there) aborted = options_.aborted_there();
  // Looked up before anything is read: what a rank sent before it left is received first.
  for (int rank = 0; options_.has_left && rank < static_cast<int>(peers_.size()); ++rank) {
    peers_[static_cast<std::size_t>(rank)].gone = options_.has_left(rank);
  }
  bool moved = take_unexpected();
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.broken) {
      const std::size_t before = just_done_.size();
      fail_peer(rank, peer.broken);
      moved |= just_done_.size() != before;
      continue;
    }
    try {
      if (!peer.sends.empty()) moved |= progress_sends(rank);
      if (wants_from(rank)) moved |= progress_receives(rank);
    } catch (const SystemError& error) {
      fail_peer(rank, std::make_exception_ptr(PeerLost(fmt::format("{} lost: {}", name_of(rank), error.what()),
                                                       options_.global_ranks[static_cast<std::size_t>(rank)])));
      moved = true;
    } catch (const ProtocolError& error) {
      fail_peer(rank, std::make_exception_ptr(ProtocolError(fmt::format("{} sent {}", name_of(rank), error.what()))));
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
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  bool moved = false;
  while (!peer.sends.empty()) {
    const auto message = peer.sends.front();
    try {
      if (!open_outgoing(rank)) return moved;
    } catch (const SystemError&) {  // no descriptor, no thread: the peer is not to blame
      fail_peer(rank, std::current_exception());
      return true;
    }
    if (!std::exchange(peer.sending, true)) peer.outgoing->begin(*message);
    if (!peer.outgoing->advance(*message, moved)) return moved;
    peer.sends.pop_front();
    peer.sending = false;
    finish(message, nullptr);
    moved = true;
  }
  return moved;
}

bool MessageEngine::open_outgoing(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.outgoing) return true;
  if (peer.dial) {
    if (!peer.dial->done()) return false;
    peer.outgoing = std::make_unique<OutgoingStream>(make_data_sink(peer.dial->take(), channel_options_));
    peer.dial.reset();
    return true;
  }
  if (auto sink = options_.local_sink ? options_.local_sink(rank) : nullptr) {
    peer.outgoing = std::make_unique<OutgoingStream>(std::move(sink));
    return true;
  }
  const auto dials = std::count_if(peers_.begin(), peers_.end(), [](const Peer& p) { return p.dial && !p.dial->done(); });
  if (dials >= kDialsAtOnce) return false;
  // Messages have deadlines, which differ; the connection serves all of them.
  peer.dial = std::make_unique<BackgroundDial>(
      [this, global = options_.global_ranks[static_cast<std::size_t>(rank)]] {
        return options_.connector->dial(global, options_.lane, Deadline::never(), ended_);
      },
      [this] { wake_sleepers(); });
  return false;
}

bool MessageEngine::wants_from(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.broken) return false;
  if (peer.receiving || peer.keeping) return true;
  return std::any_of(receives_.begin(), receives_.end(),
                     [rank](const auto& message) { return message->peer == rank || message->peer == kAnyone; });
}

bool MessageEngine::open_incoming(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.incoming) return true;
  auto source = options_.local_source ? options_.local_source(rank) : nullptr;
  if (!source) {
    SecureConnection connection = options_.connector->try_take(options_.global_ranks[static_cast<std::size_t>(rank)], options_.lane);
    if (!connection) return false;
    source = make_data_source(std::move(connection), channel_options_);
  }
  peer.incoming = std::make_unique<IncomingStream>(std::move(source));
  return true;
}

bool MessageEngine::progress_receives(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!open_incoming(rank)) return false;
  bool moved = false;
  for (int messages = 0; messages < kMessagesAtOnce && wants_from(rank); ++messages) {
    if (!peer.receiving && !peer.keeping) {
      const MessageHeader* header = peer.incoming->peek(moved);
      if (header == nullptr || !accept_message(rank, *header)) return moved;
    }
    std::byte* data = peer.receiving ? peer.receiving->data : peer.keeping->bytes.data();
    std::size_t& got = peer.receiving ? peer.receiving->moved : peer.keeping->got;
    if (!peer.incoming->advance(data, got, moved)) return moved;
    peer.incoming->next();
    moved = true;
    if (peer.receiving) {
      peer.receiving->source = rank;
      finish(std::exchange(peer.receiving, nullptr), nullptr);
    } else {
      peer.unexpected.push_back(std::move(*peer.keeping));
      peer.keeping.reset();
      take_unexpected();
    }
  }
  return moved;
}

// Decides where the message at hand goes: to the first receive that fits, or aside.
bool MessageEngine::accept_message(int rank, const MessageHeader& header) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (auto message = match(rank, header)) {
    peer.receiving = std::move(message);
    return true;
  }
  if (header.length > options_.unexpected_limit - std::min(options_.unexpected_limit, unexpected_bytes_)) {
    throw ProtocolError(fmt::format("messages that nobody has asked for ({} bytes kept, {} more of tag {}); receive them "
                                    "earlier or raise MANIPLE_UNEXPECTED_MIB", unexpected_bytes_, header.length, header.tag));
  }
  peer.keeping = std::make_unique<Peer::Unexpected>();
  peer.keeping->header = header;
  peer.keeping->bytes.resize(header.length);
  unexpected_bytes_ += header.length;
  return true;
}

// Throws Mismatch when the receive that is due expects something else; that receive has failed then.
std::shared_ptr<Message> MessageEngine::match(int rank, const MessageHeader& header) {
  const auto it = std::find_if(receives_.begin(), receives_.end(), [&](const auto& message) {
    return (message->peer == rank || message->peer == kAnyone) && message->tag == header.tag;
  });
  if (it == receives_.end()) return nullptr;
  const auto message = *it;
  receives_.erase(it);
  if (message->dtype == header.dtype && message->bytes == header.length) return message;
  const Mismatch error(fmt::format("{} sent {}[{}] with tag {} where {}[{}] is received", name_of(rank), to_string(header.dtype),
                                   header.length / size_of(header.dtype), header.tag, to_string(message->dtype),
                                   message->bytes / size_of(message->dtype)));
  finish(message, std::make_exception_ptr(error));
  throw error;
}

// Serves receives from what was kept aside, oldest first.
bool MessageEngine::take_unexpected() {
  if (unexpected_bytes_ == 0 && std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.unexpected.empty(); })) {
    return false;
  }
  bool moved = false;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    for (auto it = peer.unexpected.begin(); it != peer.unexpected.end();) {
      std::shared_ptr<Message> message;
      try {
        message = match(rank, it->header);
      } catch (const Mismatch&) {
        unexpected_bytes_ -= it->bytes.size();
        peer.unexpected.erase(it);
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

void MessageEngine::idle(Lock& lock, std::uint32_t bell, Deadline limit) {
  constexpr auto kLook = std::chrono::milliseconds(50);
  std::vector<pollfd> waiting;
  bool rings = false;
  bool awaits_lane = false;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (rank == options_.rank) continue;  // its ring moves only when this engine does
    if (!peer.sends.empty() && peer.outgoing) {
      if (peer.outgoing->fd() >= 0) waiting.push_back({peer.outgoing->fd(), POLLOUT, 0});
      rings |= peer.outgoing->fd() < 0;
    }
    if (!wants_from(rank)) continue;
    if (peer.incoming && peer.incoming->fd() >= 0) waiting.push_back({peer.incoming->fd(), POLLIN, 0});
    rings |= peer.incoming && peer.incoming->fd() < 0;
    awaits_lane |= !peer.incoming;
  }
  const Deadline until = Deadline::sooner(limit, Deadline::after(kLook));
  if (waiting.empty() && !awaits_lane && rings) {
    lock.unlock();
    options_.await_bell(bell, until);
    lock.lock();
    return;
  }
  if (awaits_lane && options_.connector != nullptr) waiting.push_back({options_.connector->arrival_fd(), POLLIN, 0});
  waiting.push_back({options_.abort->fd(), POLLIN, 0});
  waiting.push_back({nudge_.get(), POLLIN, 0});
  lock.unlock();
  // Rings cannot be polled; beside sockets they are looked at often.
  const int limit_ms = rings ? 1 : std::max(1, until.poll_ms());
  ::poll(waiting.data(), waiting.size(), limit_ms);
  lock.lock();
  eventfd_t count = 0;
  ::eventfd_read(nudge_.get(), &count);
}

}  // namespace maniple
