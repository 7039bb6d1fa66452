// Detects ranks of the world that died, stopped or became unreachable, and reports each failure to all ranks.
//
// A star: every rank holds one connection to the leader. A dying process closes its connection, and the leader informs
// all ranks at once. Heartbeats run both ways; a rank silent for longer than the limit counts as lost. The limit is ten
// times as long for a rank of this host that is merely starved of processor time, as its state in /proc shows. Time in
// which the observer itself was held up does not count (silence.h).
//
// The leader is the lowest rank not known to be gone, at first rank 0. When the leader is lost or leaves in good order,
// each rank discovers that by itself (its connection closes or falls silent) and dials the next one. A rank may accept
// connections before it knows that it is the leader. The new leader checks ranks that do not connect:
//   no process listens at its address   it left in good order or ended, which of the two is unknown: it is *gone*.
//                                       Groups are not aborted, as data it sent before leaving must still be received;
//                                       but ranks that wait for it in shared memory are notified. (Over TCP its
//                                       connections have closed.)
//   silence                             it is lost, like any rank that sends no heartbeats
// A rank repeats its report of an abort to each new leader until a leader has passed it on, and it tells each new
// leader which ranks are lost: the old leader may have ended before it told all ranks. A leader tells each rank that
// connects late which ranks are gone and which groups have failed.
//
// When a connection between two ranks closes, the remaining rank cannot tell whether its peer left the group or is
// dying: an ending process closes its connections one by one. The leader queries the peer and passes the report on when
// the peer replies, its process has ended, or after 1.5 s.
//
// detector_core.h makes all decisions. This class binds them to connections, the clock and the event loop, in whose
// thread it runs. Callbacks run there and must not block.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/net/event_loop.h"
#include "comm/net/secure_connection.h"
#include "comm/session/detector_core.h"
#include "comm/session/peer_table.h"

namespace maniple {

class FailureDetector {
 public:
  struct Events {
    std::function<void(int rank, const std::string& text)> lost;
    std::function<void(int rank)> gone;
    std::function<void(const detector::Abort&)> aborted;
    std::function<void(const detector::Departed&)> departed;
    /// A leader's decision that answers this rank's request, and the reply to cancel_shrink (survivors.h).
    std::function<void(const detector::Survivors&)> survivors;
    std::function<void(const detector::Missing&)> missing;
    /// Returns this rank's call number `seq` in `group`; empty if it has not made that call.
    std::function<RankCall(const std::string& group, std::uint64_t seq)> called;
    /// See wait_report.h.
    std::function<void(const detector::Waiting&)> waiting;
    std::function<std::optional<detector::ProgressReply>(const detector::QueryProgress&)> progress;
    std::function<void(const detector::ProgressReply&)> progress_reply;
    /// Connects to a rank's control listener. Blocks; runs in a thread of its own.
    std::function<SecureConnection(int rank, Deadline deadline, int cancel)> dial;
  };

  FailureDetector(std::shared_ptr<EventLoop> loop, int rank, std::vector<PeerInfo> peers, double heartbeat_s,
                  Events events);
  ~FailureDetector();  ///< announces that this rank leaves; waits only, briefly, for a handshake with a new leader

  /// Takes the connection of a rank that dialled in, or this rank's connection to rank 0, made in init().
  void adopt(int rank, SecureConnection connection);
  /// On rank 0: ranks that have not dialled in by the deadline are lost.
  void expect_all_by(Deadline deadline);

  /// Reports an abort to all ranks. For a mismatch, every rank is first asked for its call, and the error lists the
  /// replies. Any thread.
  void report_abort(const detector::Abort& abort);
  void announce(const detector::Departed& departed);  ///< to all ranks; any thread
  void announce(const detector::Compare& compare);    ///< to the leader; any thread
  // See survivors.h. Any thread.
  void shrink(const detector::Shrink& request);
  void cancel_shrink(const std::string& group);

  // In the event loop's thread.
  void send_to_leader(const detector::Waiting& waiting);        ///< dropped while there is no leader
  void send(int rank, const detector::QueryProgress& message);  ///< on the leader

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace maniple
