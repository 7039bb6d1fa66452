// How messages fail: with the whole engine, with their peer, or alone at their deadline.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "transport/message_engine.h"

namespace maniple {

void MessageEngine::fail_all(const std::exception_ptr& cause) {
  ended_.raise(cause);
  for (PeerState& peer : peers_) {
    for (const auto& message : peer.sends) finish(message, cause);
    peer.sends.clear();
    if (peer.receiving) finish(std::exchange(peer.receiving, nullptr), cause);
  }
  for (const auto& message : receives_) finish(message, cause);
  receives_.clear();
}

void MessageEngine::fail_peer(int rank, const std::exception_ptr& cause) {
  PeerState& peer = state(rank);
  peer.broken = cause;
  for (const auto& message : peer.sends) finish(message, cause);
  peer.sends.clear();
  if (peer.receiving) finish(std::exchange(peer.receiving, nullptr), cause);
  if (peer.buffering) unexpected_bytes_ -= peer.buffering->bytes.size();
  peer.buffering.reset();
  const bool no_peer_left = std::all_of(peers_.begin(), peers_.end(), [this](const PeerState& other) {
    return other.broken || &other == &peers_[static_cast<std::size_t>(options_.rank)];
  });
  for (auto it = receives_.begin(); it != receives_.end();) {
    // A receive from anyone fails only when no rank is left that could send.
    if ((*it)->peer == rank || ((*it)->peer == kAnyone && no_peer_left)) {
      finish(*it, cause);
      it = receives_.erase(it);
    } else {
      ++it;
    }
  }
}

// What a rank sent before it left is received first: its leaving counts once nothing moves.
void MessageEngine::fail_expired(bool moved) {
  const bool pending = !receives_.empty() || std::any_of(peers_.begin(), peers_.end(), [](const PeerState& peer) {
    return !peer.sends.empty() || peer.receiving;
  });
  if (!pending) return;
  const auto now = Deadline::Clock::now();
  // Some rank, if all the others have left or are lost: no rank remains then that could send what a receive from anyone awaits.
  int last_to_leave = kAnyone;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const PeerState& peer = peers_[static_cast<std::size_t>(rank)];
    if (rank == options_.rank || peer.broken) continue;
    last_to_leave = rank;
    if (!peer.gone) break;
  }
  const auto progress_of = [](const Message& message, const std::string& who) {
    return fmt::format("{} of {} bytes {} {}", message.moved, message.bytes,
                       message.op == Op::send ? "sent to" : "received from", who);
  };
  for (auto it = receives_.begin(); it != receives_.end();) {
    const auto& message = *it;
    const int peer = message->peer == kAnyone ? last_to_leave : message->peer;
    const bool gone = !moved && peer != kAnyone && peers_[static_cast<std::size_t>(peer)].gone;
    if (gone) {
      finish(message,
             std::make_exception_ptr(PeerLost(fmt::format("{} has left the group and sent nothing more", name_of(peer)),
                                              options_.global_ranks[static_cast<std::size_t>(peer)])));
    } else if (message->deadline.when() <= now) {
      const std::string who = message->peer == kAnyone ? "anyone" : name_of(message->peer);
      finish(message, std::make_exception_ptr(Timeout("timed out: " + progress_of(*message, who))));
    } else {
      ++it;
      continue;
    }
    it = receives_.erase(it);
  }
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    PeerState& peer = state(rank);
    const bool gone = !moved && peer.gone;
    // A message that stops half way leaves the connection unusable, so the peer is given up with it.
    for (const Message* message : {peer.sends.empty() ? nullptr : peer.sends.front().get(), peer.receiving.get()}) {
      if (message == nullptr) continue;
      const bool begun = message == peer.receiving.get() || peer.sending;
      if (!gone && (!begun || message->deadline.when() > now)) continue;
      const std::string what = progress_of(*message, name_of(rank));
      fail_peer(rank, gone ? std::make_exception_ptr(PeerLost(what + " before it left the group",
                                                              options_.global_ranks[static_cast<std::size_t>(rank)]))
                           : std::make_exception_ptr(Timeout("timed out: " + what)));
      break;
    }
    if (peer.sends.empty()) continue;
    std::size_t before = 0;  // sends that are still ahead of it
    std::erase_if(peer.sends, [&](const std::shared_ptr<Message>& message) {
      const bool begun = before == 0 && peer.sending;
      if (begun || message->deadline.when() > now) return ++before, false;
      std::string text = "timed out: " + progress_of(*message, name_of(rank));
      if (!peer.sender) text += ", not connected yet";
      if (before != 0) text += fmt::format(", behind {} earlier send{}", before, before == 1 ? "" : "s");
      finish(message, std::make_exception_ptr(Timeout(text)));
      return true;
    });
  }
}

}  // namespace maniple
