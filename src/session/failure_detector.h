// The watch over the ranks of a world: notices the dead, the stopped and the unreachable, and spreads the word.
//
// A star: every rank holds one connection to the hub. A process that dies closes it, and the hub tells everyone at once.
// Heartbeats run both ways; silence longer than the limit counts as loss (a rank of this host that is merely starved of
// processor time, as its state in /proc shows, gets ten times as long).
//
// The hub is the lowest rank that is not known to be gone: at first rank 0. When the hub is lost or leaves in good order, each
// rank finds that out by itself (its connection closes, or is silent) and dials the next one. Ranks may come to a new hub
// before it knows that it is the hub: it keeps them. The new hub looks after those that do not come:
//   nobody listens at its address   it has ended or left meanwhile, and nobody can say which: it is *gone*. Groups are not
//                                   aborted, as what it did before it left must still be received; but whoever waits for it
//                                   in shared memory is told. (Over TCP its connections have closed.)
//   silence                         it is lost, like any rank that sends no heartbeats
// What a rank has reported (an abort) is reported again to the next hub until a hub has passed it on.
//
// Runs in the event loop's thread. Callbacks run there and must not block.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/event_loop.h"
#include "net/secure_connection.h"
#include "session/detector_wire.h"
#include "session/peer_table.h"

namespace maniple {

class FailureDetector {
 public:
  struct Events {
    std::function<void(int rank, const std::string& text)> lost;
    std::function<void(int rank)> gone;
    std::function<void(const DetectorMessage&)> aborted;
    /// What this rank called as number `seq` of `group`; empty if it has not come to that.
    std::function<std::string(const std::string& group, std::uint64_t seq)> called;
    /// See wait_report.h.
    std::function<void(const DetectorMessage&)> waiting;
    std::function<DetectorMessage(const DetectorMessage& question)> position;
    std::function<void(const DetectorMessage&)> positioned;
    /// Connects to a rank's control listener. Blocks; run in a thread of its own.
    std::function<SecureConnection(int rank, Deadline deadline, int cancel)> dial;
  };

  FailureDetector(std::shared_ptr<EventLoop> loop, int rank, std::vector<PeerInfo> peers, double heartbeat_s, Events events);
  ~FailureDetector();  ///< says bye; waits for nobody but for a handshake with a new hub, a moment

  /// For each rank that dials in; and for the connection to rank 0 that a rank makes when it joins.
  void adopt(int rank, SecureConnection connection);
  /// On rank 0: ranks that have not dialled in by then are lost.
  void expect_all_by(Deadline deadline);

  /// Tells all ranks. A mismatch first asks every rank what it called and adds the answers to the text. Any thread.
  void spread(const DetectorMessage& abort);

  // In the event loop's thread.
  void tell_hub(const DetectorMessage& message);        ///< or nobody, while there is none
  void send(int rank, const DetectorMessage& message);  ///< on the hub

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace maniple
