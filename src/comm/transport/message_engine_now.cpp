// Messages that bypass the engine's queues: small ones between ranks of one host, which the calling thread sends and
// receives; and sends that would wait behind others, which are copied.
#include <algorithm>
#include <utility>

#include "comm/base/threads.h"
#include "comm/transport/message_engine.h"

namespace maniple {
namespace {

constexpr std::size_t kMostBytes = 16 << 10;  // larger messages gain nothing

}  // namespace

bool MessageEngine::try_now(Message& message) {
  if (message.peer == kAnyone || message.bytes > kMostBytes) return false;
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock || ended_.raised()) return false;
  PeerState& peer = state(message.peer);
  if (peer.broken) return false;
  try {
    if (message.op == Op::send ? !send_now(peer, message) : !receive_now(peer, message)) return false;
  } catch (const Error&) {  // the message will fail with this error when it is started
    fail_peer(message.peer, std::current_exception());
    return false;
  }
  message.source = message.peer;
  return true;
}

bool MessageEngine::send_now(PeerState& peer, const Message& message) {
  if (!peer.sender || !peer.sends.empty() || !peer.sender->takes_whole(message.bytes)) return false;
  if (peer.slots_out && peer.slots_out->put(message.tag, message.dtype, message.data, message.bytes, peer.frames_out))
    return true;
  peer.outgoing = {};
  peer.outgoing.dtype = message.dtype;
  peer.outgoing.tag = message.tag;
  peer.outgoing.from = message.data;
  peer.outgoing.size = message.bytes;
  peer.sender->post(peer.outgoing, Deadline::never());
  ++peer.frames_out;
  peer.sender->advance();
  return true;
}

bool MessageEngine::receive_now(PeerState& peer, const Message& message) {
  // Without background messages no other thread needs the lock or matches arriving messages.
  if (!peer.receiver || !peer.receiver->local() || peer.receiving || peer.buffering || !receives_.empty() ||
      unexpected_count_ != 0 || !in_background_.empty())
    return false;
  const auto slot_ready = [&peer] { return peer.slots_in && peer.slots_in->ready(peer.frames_in); };
  const auto has_arrived = [&] { return slot_ready() || peer.receiver->arrived(); };
  if (!has_arrived()) {
    if (options_.waiter == nullptr) return false;
    Waiter::Wait wait(*options_.waiter);
    while (!wait.spin(has_arrived)) {
      if (!wait.may_spin()) return false;
    }
  }
  const FrameHeader* const header = slot_ready() ? nullptr : peer.receiver->peek();
  if (slot_ready()) {  // checked again: a slot may precede the frame that is visible
    const MessageSlots::Small small = peer.slots_in->next();
    if (small.tag != message.tag || small.dtype != message.dtype || small.bytes.size() != message.bytes) return false;
    std::copy(small.bytes.begin(), small.bytes.end(), message.data);
    peer.slots_in->pop();
    return true;
  }
  if (header == nullptr) return false;
  if (header->tag != message.tag || header->dtype != message.dtype || header->length != message.bytes ||
      !peer.receiver->has_whole())
    return false;
  peer.incoming = {};
  peer.incoming.dtype = message.dtype;
  peer.incoming.tag = message.tag;
  peer.incoming.to = message.data;
  peer.incoming.size = message.bytes;
  peer.receiver->accept(peer.incoming);
  ++peer.frames_in;
  if (!peer.incoming.done) peer.receiver->advance();
  return true;
}

// A send that waits behind another to the same rank is copied and counts as sent, as if it fitted into a ring: this
// rank may then receive a message that the other rank waits to send. Copies are limited to the capacity between the two
// ranks, so they are in transit as soon as the other rank has received the messages ahead of them.
bool MessageEngine::copy_aside(const Message& message) {
  if (message.op != Op::send) return false;
  constexpr std::size_t kMaxCopied = std::size_t{256} << 10;
  PeerState& peer = state(message.peer);
  const auto it = std::find_if(peer.sends.begin(), peer.sends.end(),
                               [&message](const auto& other) { return other.get() == &message; });
  if (it == peer.sends.begin() || it == peer.sends.end()) return false;
  if (!peer.sender) return false;  // not connected yet: the send may still fail
  const std::size_t most = std::min(kMaxCopied, peer.sender->capacity());
  const std::size_t bytes = kFrameHeaderBytes + message.bytes;
  if (bytes > most - std::min(most, peer.copied_bytes)) return false;

  auto copy = std::make_shared<Message>();
  copy->peer = message.peer;
  copy->tag = message.tag;
  copy->dtype = message.dtype;
  copy->bytes = message.bytes;
  copy->since = message.since;
  copy->waiters = std::make_shared<const std::atomic<int>>(0);
  copy->copy = std::make_unique<std::byte[]>(message.bytes);
  copy->data = copy->copy.get();
  std::copy_n(message.data, message.bytes, copy->data);
  if (!thread_.joinable()) thread_ = start_thread("messages", [this] { this->background(); });
  in_background_.push_back(copy);
  peer.copied_bytes += bytes;
  const std::shared_ptr<Message> original = std::exchange(*it, std::move(copy));
  original->moved = original->bytes;
  finish(original, nullptr);
  return true;
}

// Copies have no waiter: the message ahead of them finishes together with them, so that its Work reports their failure.
void MessageEngine::finish_sent(PeerState& peer, const std::shared_ptr<Message>& message) {
  const bool copies_follow = !peer.sends.empty() && peer.sends.front()->copy;
  if (message->copy) peer.copied_bytes -= kFrameHeaderBytes + message->bytes;
  if (copies_follow && !message->copy) {
    peer.followed = message;
    return;
  }
  finish(message, nullptr);
  if (!copies_follow && peer.followed) finish(std::exchange(peer.followed, nullptr), nullptr);
}

// Takes that rank's next message if it is in a slot, and frees the slot at once.
bool MessageEngine::take_slot(int rank) {
  PeerState& peer = state(rank);
  if (!peer.slots_in || !peer.slots_in->ready(peer.frames_in)) return false;
  const MessageSlots::Small small = peer.slots_in->next();
  if (auto message = match(rank, small.dtype, small.tag, small.bytes.size())) {
    std::copy(small.bytes.begin(), small.bytes.end(), message->data);
    message->moved = small.bytes.size();
    message->source = rank;
    finish(message, nullptr);
  } else {
    reserve_unexpected(rank, small.tag, small.bytes.size());
    peer.unexpected.push_back({small.dtype, small.tag, {small.bytes.begin(), small.bytes.end()}});
    ++unexpected_count_;
  }
  peer.slots_in->pop();
  return true;
}

}  // namespace maniple
