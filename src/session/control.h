// The watch over the ranks of a world: notices the dead, the stopped and the unreachable, and spreads the word.
//
// A star: every rank holds one connection to the hub, which is rank 0. A process that dies closes it, and the hub tells
// everyone at once. Heartbeats run both ways; silence longer than the limit counts as loss (a rank of this host that is
// merely starved of processor time, as its state in /proc shows, gets ten times as long). Rank 0 leaving in good order ends
// the watch; operations still have their deadlines.
//
// Runs in the event loop's thread. Callbacks run there and must not block.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "net/event_loop.h"
#include "session/control_wire.h"
#include "session/peer_table.h"

namespace maniple {

class Control {
 public:
  struct Events {
    std::function<void(int rank, const std::string& text)> lost;
    std::function<void(const ControlMessage&)> aborted;
    /// What this rank called as number `seq` of `group`; empty if it has not come to that.
    std::function<std::string(const std::string& group, std::uint64_t seq)> called;
  };

  Control(std::shared_ptr<EventLoop> loop, int rank, std::vector<PeerInfo> peers, double heartbeat_s, Events events);
  ~Control();  ///< says bye; never waits for peers

  /// On the hub, for each rank that dials in; on the others, for the connection to the hub (`rank` 0).
  void adopt(int rank, UniqueFd connection);
  /// On the hub: ranks that have not dialled in by then are lost.
  void expect_all_by(Deadline deadline);

  /// Tells all ranks. A mismatch first asks every rank what it called and adds the answers to the text. Any thread.
  void spread(const ControlMessage& abort);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace maniple
