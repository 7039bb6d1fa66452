// Failure of messages: all of the engine's, all of a peer's, or a single one at its deadline.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "comm/base/error_codec.h"
#include "comm/transport/message_engine.h"

namespace maniple {
namespace {

std::string progress_of(const Message& message, const std::string& who) {
  return fmt::format("{} of {} bytes {} {}", message.moved, message.bytes,
                     message.op == Op::send ? "sent to" : "received from", who);
}

double waited_for(const Message& message) {
  return std::chrono::duration<double>(Deadline::Clock::now() - message.since).count();
}

}  // namespace

void MessageEngine::fail_all(const std::exception_ptr& cause) {
  ended_.raise(cause);
  for (PeerState& peer : peers_) {
    for (const auto& message : peer.sends) finish(message, cause);
    peer.sends.clear();
    if (peer.followed) finish(std::exchange(peer.followed, nullptr), cause);
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
  peer.copied_bytes = 0;
  if (peer.followed) finish(std::exchange(peer.followed, nullptr), cause);
  if (peer.receiving) finish(std::exchange(peer.receiving, nullptr), cause);
  if (peer.buffering) unexpected_bytes_ -= peer.buffering->bytes.size();
  peer.buffering.reset();
  const bool no_peer_left = std::all_of(peers_.begin(), peers_.end(), [this](const PeerState& other) {
    return other.broken || &other == &peers_[options_.rank];
  });
  for (auto it = receives_.begin(); it != receives_.end();) {
    // A receive from any source fails only if no rank remains that could send.
    if ((*it)->peer == rank || ((*it)->peer == kAnyone && no_peer_left)) {
      finish(*it, cause);
      it = receives_.erase(it);
    } else {
      ++it;
    }
  }
}

// Makes a Timeout, or a PeerLost if `loss` is known.
std::exception_ptr MessageEngine::gave_up(const Message& message, int rank, const std::string& why,
                                          LossKind loss) const {
  ErrorInfo info;
  info.kind = loss == LossKind::unknown ? ErrorKind::timeout : ErrorKind::peer_lost;
  if (rank != kAnyone) info.ranks = {peer_of(rank).global_rank};
  if (loss != LossKind::unknown && rank != kAnyone) info.origin = peer_of(rank).global_rank;
  info.waited_s = waited_for(message);
  info.bytes_moved = message.moved;
  info.bytes_expected = message.bytes;
  info.loss = loss;
  info.reason = loss == LossKind::unknown ? fmt::format("timed out after {:.1f} s: {}", info.waited_s, why) : why;
  return make_error(std::move(info));
}

// Messages that a rank sent before it left are received first: its departure counts once nothing moves.
void MessageEngine::fail_expired(bool moved) {
  const bool pending = !receives_.empty() || std::any_of(peers_.begin(), peers_.end(), [](const PeerState& peer) {
    return !peer.sends.empty() || peer.followed || peer.receiving;
  });
  if (!pending) return;
  const auto now = Deadline::Clock::now();
  // A departed rank if all other ranks have left or are lost: no rank can then send to a receive from any source.
  // Otherwise a rank that is present.
  int last_to_leave = kAnyone;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const PeerState& peer = peers_[rank];
    if (rank == options_.rank || peer.broken) continue;
    last_to_leave = rank;
    if (peer.gone == LossKind::unknown) break;
  }
  for (auto it = receives_.begin(); it != receives_.end();) {
    const auto& message = *it;
    const int peer = message->peer == kAnyone ? last_to_leave : message->peer;
    const LossKind gone = moved || peer == kAnyone ? LossKind::unknown : state(peer).gone;
    if (gone != LossKind::unknown) {
      finish(message,
             gave_up(*message, peer, fmt::format("{} has left the group and sent nothing more", name_of(peer)), gone));
    } else if (message->deadline.when() <= now) {
      const std::string who = message->peer == kAnyone ? "anyone" : name_of(message->peer);
      finish(message, gave_up(*message, message->peer, progress_of(*message, who), LossKind::unknown));
    } else {
      ++it;
      continue;
    }
    it = receives_.erase(it);
  }
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    PeerState& peer = state(rank);
    const LossKind loss = moved ? LossKind::unknown : peer.gone;
    const bool gone = loss != LossKind::unknown;
    // A message that stops half way leaves the connection unusable, so all of the peer's messages fail.
    for (const Message* message : {static_cast<const Message*>(peer.followed.get()),
                                   peer.sends.empty() ? nullptr : static_cast<const Message*>(peer.sends.front().get()),
                                   static_cast<const Message*>(peer.receiving.get())}) {
      if (message == nullptr) continue;
      const bool begun = message == peer.receiving.get() || message == peer.followed.get() || peer.sending;
      if (!gone && (!begun || message->deadline.when() > now)) continue;
      std::string what = progress_of(*message, name_of(rank));
      if (message == peer.followed.get())
        what += fmt::format(", but not the {} bytes of smaller sends behind it", peer.copied_bytes);
      fail_peer(rank, gave_up(*message, rank, gone ? what + " before it left the group" : what, loss));
      break;
    }
    if (peer.sends.empty()) continue;
    std::size_t before = 0;  // sends still ahead of this one
    std::erase_if(peer.sends, [&](const std::shared_ptr<Message>& message) {
      const bool begun = before == 0 && peer.sending;
      if (begun || message->deadline.when() > now) return ++before, false;
      std::string text = progress_of(*message, name_of(rank));
      if (!peer.sender) text += ", not connected yet";
      if (before != 0) text += fmt::format(", behind {} earlier send{}", before, before == 1 ? "" : "s");
      finish(message, gave_up(*message, rank, text, LossKind::unknown));
      return true;
    });
  }
}

}  // namespace maniple
