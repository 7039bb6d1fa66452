// Notices ranks of the world that died, stopped or became unreachable, and reports each failure to all ranks.
//
// A star: every rank holds one connection to the leader. A process that dies closes it, and the leader tells everyone
// at once. Heartbeats run both ways; silence longer than the limit counts as loss (a rank of this host that is merely
// starved of processor time, as its state in /proc shows, gets ten times as long). Time in which the observer itself
// was held up does not count (silence.h).
//
// The leader is the lowest rank that is not known to be gone: at first rank 0. When it is lost or leaves in good order,
// each rank finds that out by itself (its connection closes, or is silent) and dials the next one. Ranks may connect to
// a new leader before it knows that it is the leader: it keeps them. The new leader checks those that do not connect:
//   no process listens at its address   it has ended or left meanwhile, and nobody can say which: it is *gone*. Groups
//                                       are not aborted, as what it did before it left must still be received; but
//                                       whoever waits for it in shared memory is notified. (Over TCP its connections
//                                       have closed.)
//   silence                             it is lost, like any rank that sends no heartbeats
// What a rank has reported (an abort) is reported again to the next leader until a leader has passed it on.
//
// A rank whose connection to another was closed cannot tell whether that one left the group or is dying: a process that
// ends closes its connections one by one. The leader asks it, and passes the report on when it has answered, its
// process has ended, or neither has happened for 1.5 s.
//
// Runs in the event loop's thread. Callbacks run there and must not block.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/net/event_loop.h"
#include "comm/net/secure_connection.h"
#include "comm/session/detector_wire.h"
#include "comm/session/peer_table.h"

namespace maniple {

/// Whether the leader asks the rank that was lost whether it lives before it passes the error on.
inline bool asks_whether_alive(const ErrorInfo& error) {
  return error.kind == ErrorKind::peer_lost && error.loss == LossKind::left_or_ended && error.ranks.size() == 1;
}

class FailureDetector {
 public:
  struct Events {
    std::function<void(int rank, const std::string& text)> lost;
    std::function<void(int rank)> gone;
    std::function<void(const DetectorMessage&)> aborted;
    std::function<void(const DetectorMessage&)> departed;
    /// What this rank called as number `seq` of `group`; empty if it has not made that call.
    std::function<RankCall(const std::string& group, std::uint64_t seq)> called;
    /// See wait_report.h.
    std::function<void(const DetectorMessage&)> waiting;
    std::function<DetectorMessage(const DetectorMessage& query)> progress;
    std::function<void(const DetectorMessage&)> progress_reply;
    /// Connects to a rank's control listener. Blocks; run in a thread of its own.
    std::function<SecureConnection(int rank, Deadline deadline, int cancel)> dial;
  };

  FailureDetector(std::shared_ptr<EventLoop> loop, int rank, std::vector<PeerInfo> peers, double heartbeat_s,
                  Events events);
  ~FailureDetector();  ///< announces that it leaves; waits for nobody but, briefly, for a handshake with a new leader

  /// For each rank that dials in; and for the connection to rank 0 that a rank makes in init().
  void adopt(int rank, SecureConnection connection);
  /// On rank 0: ranks that have not dialled in by then are lost.
  void expect_all_by(Deadline deadline);

  /// Reports to all ranks. For a mismatch every rank is first asked what it called, which the error then lists. Any
  /// thread.
  void report_abort(const DetectorMessage& abort);
  /// To all ranks, for `departed`; to the leader, for `compare`. Any thread.
  void announce(const DetectorMessage& message);

  // In the event loop's thread.
  void send_to_leader(const DetectorMessage& message);  ///< or to nobody, while there is none
  void send(int rank, const DetectorMessage& message);  ///< on the leader

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace maniple
