// What an engine waits for while nothing moves.
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>

#include "transport/message_engine.h"

namespace maniple {

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
  if (awaits_lane && options_.switchboard != nullptr) waiting.push_back({options_.switchboard->arrival_fd(), POLLIN, 0});
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
