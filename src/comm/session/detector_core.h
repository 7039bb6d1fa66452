// The failure detector's decisions, without clock, sockets, threads or callbacks: events and the time go in, effects
// come out. The shell in failure_detector.cpp executes them; tests simulate a whole world of cores.
//
//   std::vector<detector::Effect> effects;
//   core.handle(detector::Received{.from = 3, .message = detector::Leaving{}}, now, effects);
//   for (auto& effect : effects) execute(effect);  // in this order, all of them before the next event
//
// failure_detector.h describes the protocol. A peer has at most one connection: adopting another one replaces it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "comm/session/detector_effect.h"
#include "comm/session/mismatch_report.h"
#include "comm/session/silence.h"
#include "comm/session/survivors.h"

namespace maniple::detector {

/// Interval at which rank 0 checks ranks that have not connected yet.
inline constexpr std::chrono::milliseconds kCheckPeriodDuringInit{1000};
/// Time in which a rank replies whether it is alive.
inline constexpr std::chrono::milliseconds kAliveLimit{1500};
/// Time in which an abort that a rank has reported comes back from a leader that can be reached: longer than the
/// leader's queries take, for a lost rank or for calls.
inline constexpr std::chrono::milliseconds kVerdictLimit{2000};

/// Whether the leader queries the lost rank before it passes the error on.
inline bool asks_whether_alive(const ErrorInfo& error) {
  return error.kind == ErrorKind::peer_lost && error.ranks.size() == 1;
}

// ---- Events

struct Start {};
/// A peer has connected to this rank, or this rank to rank 0 during init.
struct Adopted {
  int peer = -1;
};
/// The connection that Dial requested.
struct Dialed {
  int to = -1;
};
struct DialFailed {
  int to = -1;
  bool refused = false;  ///< no process listens at the address any more
  std::string why = {};
};
/// The peer closed its connection, or it broke.
struct Closed {
  int peer = -1;
  std::string why = {};
};
struct Received {
  int from = -1;
  Message message = {};
};
/// Authentic bytes have arrived, perhaps only a part of a message.
struct Heard {
  int from = -1;
};
/// The time of the last WakeAt has come. Early and superfluous calls do no harm.
struct Wake {};
/// No process listens at the address of a rank that was probed.
struct ProbeRefused {
  int peer = -1;
};
/// The reply to ReadProcessState.
struct ProcessState {
  int peer = -1;
  char state = '\0';  ///< see process_state
};
/// The reply to LookUpCall.
struct CallFound {
  int asker = -1;
  QueryCall query = {};
  RankCall call = {};  ///< rank -1: this rank is not in the group; an empty call: it has not made it yet
};
/// On rank 0: ranks that have not connected by then are lost.
struct ExpectAll {
  Time until{};
};
/// A group failed on this rank.
struct AbortHere {
  Abort abort = {};
};
/// This rank announces Departed to all, Compare or Waiting to the leader.
struct Announce {
  Message message = {};
};
/// This rank waits for the survivors of a group.
struct ShrinkHere {
  Shrink request = {};
};
struct CancelShrinkHere {
  std::string group = {};
};
/// This rank leaves in good order.
struct Leave {};

using Event =
    std::variant<Start, Adopted, Dialed, DialFailed, Closed, Received, Heard, Wake, ProbeRefused, ProcessState,
                 CallFound, ExpectAll, AbortHere, Announce, ShrinkHere, CancelShrinkHere, Leave>;

// The effects are in detector_effect.h.

class Core {
 public:
  struct Member {
    std::string name = {};  ///< "rank 3 (pid 4711 on node7)"
    bool same_host = false;
  };
  /// `heartbeat_s` 0: silent ranks are never lost.
  Core(int rank, std::vector<Member> members, double heartbeat_s);

  void handle(Event event, Time now, Effects& effects);

  int leader() const noexcept { return leader_; }
  bool is_leader() const noexcept { return rank_ == leader_; }
  bool is_excluded() const noexcept { return excluded_; }
  /// What is known about each rank that is gone: Lost, Left or Gone.
  const std::map<int, Message>& departures() const noexcept { return gone_; }
  bool is_linked(int peer) const { return links_.count(peer) != 0; }
  bool is_idle() const;             ///< nothing is under way: no dial, no query, no rank is awaited
  std::optional<Time> due() const;  ///< the earliest timer

 private:
  struct Link {
    Time heard{};
    bool has_received = false;
    Silence silence = {};
  };
  struct Dialing {
    int to = -1;
    Time since{};
    std::string why = {};  // of the last failure
  };
  struct Doubtful {
    Abort abort = {};
    Time until{};
  };

  // ---- Events
  void on(Start);
  void on(Adopted event);
  void on(Dialed event);
  void on(DialFailed event);
  void on(Closed event);
  void on(Received event);
  void on(Heard event);
  void on(Wake);
  void on(ProbeRefused event);
  void on(ProcessState event);
  void on(CallFound event);
  void on(ExpectAll event);
  void on(AbortHere event);
  void on(Announce event);
  void on(ShrinkHere event);
  void on(CancelShrinkHere event);
  void on(Leave);

  // ---- Messages
  void take(int from, const Heartbeat&);
  void take(int from, const Leaving&);
  void take(int from, const Lost& message);
  void take(int from, Abort& message);
  void take(int from, QueryCall& message);
  void take(int from, CallReply& message);
  void take(int from, const Left& message);
  void take(int from, const Gone& message);
  void take(int from, Waiting& message);
  void take(int from, QueryProgress& message);
  void take(int from, ProgressReply& message);
  void take(int from, const Departed& message);
  void take(int from, const Compare& message);
  void take(int from, const CallPending& message);
  void take(int from, const QueryAlive&);
  void take(int from, const Alive&);
  void take(int from, const Shrink& message);
  void take(int from, const Survivors& message);
  void take(int from, const CancelShrink& message);
  void take(int from, Missing& message);

  // ---- Members
  bool cannot_be_about(int from, std::int32_t rank);
  void link(int peer);
  bool unlink(int peer);
  void lose(int peer, const std::string& why);
  void mark_lost(int peer, const std::string& text);
  void mark_left(int peer);
  void mark_gone(int peer);
  void announce_leavers();
  void exclude(const std::string& text);
  bool is_silent(double silence_s) const { return heartbeat_s_ > 0 && silence_s >= heartbeat_s_; }
  std::optional<std::string> silence_of(double silence_s, char state) const;
  void judge(int peer, char state);
  void suspect(int peer);
  bool is_judged_elsewhere(int peer) const;
  double connect_limit_s() const;
  void beat();

  // ---- The leader
  void elect(bool in_good_order = false);
  void become_leader();
  void schedule_check(Clock::duration delay);
  void check_awaited();
  void dial_leader(Clock::duration delay);
  void brief(int peer);

  // ---- Aborts
  void report_abort(const Abort& abort);
  void pass_on(const Abort& abort);
  void pass_on_doubtful(int peer);
  void report_early_aborts();
  void broadcast_abort(const Abort& abort);
  void broadcast_finished();
  void decide_survivors();
  bool cannot_be_members(int from, const std::vector<std::int32_t>& ranks);
  void spread_departure(const Departed& message);
  void compare_calls(const Compare& message);

  int size() const { return static_cast<int>(members_.size()); }
  const Member& member(int rank) const { return members_[rank]; }
  std::vector<int> linked() const;
  void put(Effect effect) { effects_->push_back(std::move(effect)); }
  void send(int peer, Message message);
  void send_all(const Message& message);
  void set_wake();

  // ---- While handle() runs
  Time now_{};
  Effects* effects_ = nullptr;

  int rank_;
  std::vector<Member> members_;
  double heartbeat_s_;
  int leader_ = 0;  // the lowest rank that is not gone
  std::map<int, Link> links_;
  std::map<int, Message> gone_;
  std::map<int, Silence> awaited_;            // on the leader: ranks that have not connected
  std::optional<Time> init_until_;            // ranks may connect for the first time until then
  std::vector<int> leavers_;                  // on the leader: departures not announced yet
  std::map<std::string, Abort> reported_;     // by group: aborts that no leader has passed on yet
  std::vector<Abort> early_;                  // aborts reported here before this rank was the leader
  std::map<int, std::string> claims_;         // losses reported here before this rank was the leader
  std::map<std::string, Abort> failed_;       // by group: aborts that a leader has passed on
  std::map<std::string, Doubtful> doubtful_;  // on the leader, by group: aborts that await the lost rank's reply
  MismatchReports mismatches_;
  SurvivorAgreement survivors_;
  std::optional<Dialing> dialing_;
  Time last_beat_{};
  Time last_check_{};
  Clock::duration check_delay_{};  // from last_check_ to check_at_
  std::optional<Time> beat_at_;
  std::optional<Time> check_at_;
  std::optional<Time> announce_at_;
  std::optional<Time> wake_at_;  // the last WakeAt
  bool excluded_ = false;        // other ranks have declared this rank lost
  bool left_ = false;
};

}  // namespace maniple::detector
