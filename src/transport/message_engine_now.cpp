// Small messages between ranks of one host: sent and received in the calling thread, past the queues of the engine.
#include <algorithm>

#include "base/ticks.h"
#include "transport/message_engine.h"

namespace maniple {
namespace {

constexpr std::size_t kMostBytes = 16 << 10;  // larger messages gain nothing by it

}  // namespace

bool MessageEngine::try_now(Message& message) {
  if (message.peer == kAnyone || message.bytes > kMostBytes) return false;
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock || ended_.raised()) return false;
  PeerState& peer = state(message.peer);
  if (peer.broken) return false;
  try {
    if (message.op == Op::send ? !send_now(peer, message) : !receive_now(peer, message)) return false;
  } catch (const Error&) {  // the message fails with it as soon as it is started
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
  // Without messages in the background nobody else needs the lock, or will match what arrives.
  if (!peer.receiver || !peer.receiver->local() || peer.receiving || peer.buffering || !receives_.empty() ||
      unexpected_count_ != 0 || !in_background_.empty())
    return false;
  const auto slot_ready = [&peer] { return peer.slots_in && peer.slots_in->ready(peer.frames_in); };
  for (std::uint64_t start = 0, polls = 0; !slot_ready() && !peer.receiver->arrived(); ++polls) {
    relax();
    if (polls % 16 != 0) continue;
    if (const std::uint64_t now = ticks(); polls == 0) {
      start = now;
    } else if (now - start >= options_.spin_ticks) {
      return false;
    }
  }
  const FrameHeader* const header = slot_ready() ? nullptr : peer.receiver->peek();
  if (slot_ready()) {  // asked again: a frame that is seen may come after it
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

// Takes the next message of that rank if it is in a slot, which it leaves at once.
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
