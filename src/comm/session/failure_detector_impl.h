// The failure detector's internals: one object per rank, in the event loop's thread.
//
//   detector_wire.cpp             one connection: detects the end of a process first
//   failure_detector.cpp          connections, messages, aborts
//   failure_detector_members.cpp  lost, departed and silent ranks; the leader
#pragma once

#include <map>
#include <optional>
#include <set>

#include "comm/session/detector_wire.h"
#include "comm/session/failure_detector.h"
#include "comm/session/mismatch_report.h"
#include "comm/session/peer_dialer.h"

namespace maniple {

/// Interval at which rank 0 checks ranks that have not connected yet.
inline constexpr std::chrono::milliseconds kCheckPeriodDuringInit{1000};

inline DetectorMessage message_about(DetectorMessage::Kind kind, int rank, std::string text = {}) {
  DetectorMessage message;
  message.kind = kind;
  message.rank = rank;
  message.text = std::move(text);
  return message;
}

struct FailureDetector::Impl : std::enable_shared_from_this<FailureDetector::Impl> {
  using Clock = Deadline::Clock;

  std::shared_ptr<EventLoop> loop;
  int rank = 0;
  std::vector<PeerInfo> peers;
  double heartbeat_s = 0;
  Events events;

  int leader = 0;  // the lowest rank that is not gone
  std::map<int, std::shared_ptr<DetectorLink>> links;
  std::map<int, DetectorMessage> gone;              // messages `lost`, `left` or `gone`, as sent to others
  std::map<int, Silence> awaited;                   // on the leader: ranks that have not connected
  std::optional<Deadline> init_deadline;            // ranks may connect for the first time until then
  std::vector<int> leavers;                         // on the leader: departures not announced yet
  std::map<std::string, DetectorMessage> reported;  // by group: aborts that no leader has passed on yet
  std::vector<DetectorMessage> early;               // aborts reported here before this rank was the leader
  std::set<std::string> failed;                     // on the leader: groups that have failed
  std::map<std::string, DetectorMessage> doubtful;  // on the leader, by group: aborts that await the lost rank's reply
  std::shared_ptr<MismatchReports> mismatches;
  std::unique_ptr<ListenProbes> probes;
  std::unique_ptr<PeerDialer> dialer;
  Clock::time_point last_tick = Clock::now();
  Clock::time_point last_check = Clock::now();
  Clock::duration check_delay{};  // from last_check to the next one
  bool check_scheduled = false;
  bool excluded = false;  // other ranks have declared this rank lost
  bool stopped = false;

  bool is_leader() const { return rank == leader; }
  int size() const { return static_cast<int>(peers.size()); }
  const PeerInfo& info(int r) const { return peers[static_cast<std::size_t>(r)]; }
  std::string name(int r) const { return info(r).describe(r); }
  bool same_host(int r) const { return info(r).host_key == info(rank).host_key; }

  template <class Callback>
  void call_later(Clock::duration delay, Callback callback) {
    loop->call_at(Deadline::after(delay), [weak = weak_from_this(), callback] {
      const auto self = weak.lock();
      if (self && !self->stopped && !self->excluded) callback(*self);
    });
  }

  // ---- Connections and messages
  void adopt(int peer, SecureConnection connection);
  void link(int peer, SecureConnection connection);
  void on_closed(int peer, const std::string& why);
  void send_departures(DetectorLink& link);
  std::shared_ptr<DetectorLink> take(int peer);
  void send(int peer, const DetectorMessage& message);
  void send_all(const DetectorMessage& message);
  void on_message(int peer, const DetectorMessage& message);

  // ---- Members
  void lose(int peer, const std::string& why);
  void mark_lost(int peer, const std::string& text);
  void mark_left(int peer);
  void announce_leavers();
  void mark_gone(int peer);
  void on_excluded(const std::string& text);
  std::optional<std::string> silence_of(int peer, double silence) const;
  void tick();

  // ---- The leader
  void elect(bool in_good_order = false);
  void become_leader();
  void schedule_check(Clock::duration delay);
  void check_awaited();
  void dial_leader(std::chrono::microseconds delay);
  void on_dialed(int target, PeerDialer::Result& result);

  // ---- Aborts
  void report_abort(const DetectorMessage& message);
  void pass_on(const DetectorMessage& message);
  void pass_on_doubtful(int peer);
  void report_early_aborts();
  void broadcast_abort(const DetectorMessage& message);
  void spread_departure(const DetectorMessage& message);
  void compare_calls(const DetectorMessage& message);
  std::vector<int> linked() const;
  void start();
  void stop();
};

}  // namespace maniple
