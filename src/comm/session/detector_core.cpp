// Events, connections and messages of the failure detector's core.
#include "comm/session/detector_core.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace maniple::detector {

Core::Core(int rank, std::vector<Member> members, double heartbeat_s)
    : rank_(rank), members_(std::move(members)), heartbeat_s_(heartbeat_s), mismatches_(rank), survivors_(rank) {}

void Core::handle(Event event, Time now, Effects& effects) {
  now_ = now;
  effects_ = &effects;
  std::visit([this](auto& it) { on(std::move(it)); }, event);
  broadcast_finished();
  decide_survivors();
  set_wake();
  effects_ = nullptr;
}

std::optional<Time> Core::due() const {
  if (left_ || excluded_) return std::nullopt;
  std::optional<Time> due = mismatches_.due();
  const auto at = [&due](const std::optional<Time>& when) {
    if (when) due = std::min(due.value_or(*when), *when);
  };
  at(beat_at_);
  at(check_at_);
  at(announce_at_);
  for (const auto& [group, doubtful] : doubtful_) at(doubtful.until);
  return due;
}

void Core::set_wake() {
  const auto when = due();
  if (!when || (wake_at_ && *wake_at_ <= *when)) return;
  wake_at_ = when;
  put(WakeAt{*when});
}

bool Core::is_idle() const {
  return !dialing_ && awaited_.empty() && leavers_.empty() && doubtful_.empty() && !mismatches_.due();
}

// ---- Connections

void Core::send(int peer, Message message) {
  if (is_linked(peer)) put(Send{.to = peer, .message = std::move(message)});
}

void Core::send_all(const Message& message) {
  for (const auto& [peer, link] : links_) put(Send{.to = peer, .message = message});
}

std::vector<int> Core::linked() const {
  std::vector<int> ranks;
  for (const auto& [peer, link] : links_) ranks.push_back(peer);
  return ranks;
}

void Core::link(int peer) {
  links_[peer] = {.heard = now_};
  awaited_.erase(peer);
  send(peer, Heartbeat{});
  if (is_leader()) brief(peer);
}

bool Core::unlink(int peer) {
  awaited_.erase(peer);
  mismatches_.forget(peer);
  survivors_.forget(peer);
  return links_.erase(peer) != 0;
}

// A rank may have missed departures and aborts that its new leader knows of.
void Core::brief(int peer) {
  for (const auto& [rank, departure] : gone_) send(peer, departure);
  for (const auto& [group, abort] : failed_) send(peer, abort);
}

// ---- Events

void Core::on(Start) {
  if (left_) return;
  last_beat_ = now_;
  if (heartbeat_s_ > 0) beat();
}

void Core::on(Adopted event) {
  if (left_ || excluded_) return put(Close{event.peer});
  const auto it = gone_.find(event.peer);
  if (it == gone_.end()) return link(event.peer);
  const std::string text = std::visit(overloaded{[](const Lost& lost) { return lost.text; },
                                                 [&](const Left&) { return member(event.peer).name + " has left"; },
                                                 [&](const auto&) { return member(event.peer).name + " is gone"; }},
                                      it->second);
  put(Send{.to = event.peer, .message = Lost{.rank = event.peer, .text = text}});
  put(Close{event.peer});
}

// Repeats to the new leader what the old one may not have passed on.
void Core::on(Dialed event) {
  if (left_) put(Send{.to = event.to, .message = Leaving{}});
  if (left_ || excluded_ || event.to != leader_) return put(Close{event.to});
  dialing_.reset();
  link(event.to);
  for (const auto& [rank, departure] : gone_) {
    if (std::holds_alternative<Lost>(departure)) send(event.to, departure);
  }
  for (const auto& [group, abort] : reported_) send(event.to, abort);
  for (const auto& [group, abort] : failed_) {
    Abort known = abort;
    known.seq = 0;  // nobody needs to be queried again
    send(event.to, std::move(known));
  }
  for (Message& message : survivors_.report()) send(event.to, std::move(message));
}

void Core::on(DialFailed event) {
  if (left_ || excluded_ || !dialing_ || event.to != dialing_->to) return;
  if (event.refused) return mark_gone(event.to);
  dialing_->why = event.why;
  if (!is_silent(std::chrono::duration<double>(now_ - dialing_->since).count())) return judge(event.to, '\0');
  suspect(event.to);
}

void Core::on(Closed event) {
  const auto it = links_.find(event.peer);
  if (left_ || excluded_ || it == links_.end()) return;
  // A rank that leaves while it dials a new leader may close a connection that has been accepted already. (During init,
  // when rank 0 is the leader, no rank leaves in good order.)
  const bool changing = rank_ != 0 && event.peer != 0;
  if (changing && !it->second.has_received) return mark_gone(event.peer);
  lose(event.peer, event.why);
}

void Core::on(Heard event) {
  if (const auto it = links_.find(event.from); it != links_.end()) it->second.heard = now_;
}

void Core::on(Received event) {
  const auto it = links_.find(event.from);
  if (left_ || excluded_ || it == links_.end()) return;
  it->second.heard = now_;
  it->second.has_received = true;
  std::visit([&](auto& message) { take(event.from, message); }, event.message);
}

void Core::on(Wake) {
  if (left_ || excluded_) return;
  if (wake_at_ && now_ >= *wake_at_) wake_at_.reset();
  if (announce_at_ && now_ >= *announce_at_) announce_leavers();
  std::vector<Abort> overdue;
  for (const auto& [group, doubtful] : doubtful_) {
    if (now_ >= doubtful.until) overdue.push_back(doubtful.abort);
  }
  for (const Abort& abort : overdue) {
    doubtful_.erase(abort.group);
    pass_on(abort);
  }
  mismatches_.wake(linked(), now_, *effects_);
  if (check_at_ && now_ >= *check_at_) check_awaited();
  if (beat_at_ && now_ >= *beat_at_) beat();
}

void Core::on(ProbeRefused event) {
  if (left_ || excluded_ || awaited_.count(event.peer) == 0) return;
  if (init_until_) return lose(event.peer, "its process ended during init, before it connected");
  mark_gone(event.peer);
}

void Core::on(ProcessState event) {
  if (!left_ && !excluded_) judge(event.peer, event.state);
}

void Core::on(CallFound event) {
  if (left_ || excluded_ || event.call.rank < 0) return;  // this rank is not in the group, or not yet
  if (event.asker == rank_) return mismatches_.answered(event.query, std::move(event.call));
  if (event.call.call.empty()) {
    return send(event.asker, CallPending{.rank = rank_, .seq = event.query.seq, .group = event.query.group});
  }
  send(event.asker, CallReply{.rank = rank_,
                              .seq = event.query.seq,
                              .group = event.query.group,
                              .call = std::move(event.call.call),
                              .place = std::move(event.call.place)});
}

void Core::on(ExpectAll event) {
  if (left_) return;
  init_until_ = event.until;
  for (int r = 1; r < size(); ++r) {
    if (!is_linked(r) && gone_.count(r) == 0) awaited_[r] = Silence();
  }
  schedule_check(kCheckPeriodDuringInit);
}

void Core::on(AbortHere event) {
  if (!left_ && !excluded_) report_abort(event.abort);
}

void Core::on(Announce event) {
  if (left_ || excluded_) return;
  if (!is_leader()) return send(leader_, std::move(event.message));
  std::visit(overloaded{[this](const Compare& compare) { compare_calls(compare); },
                        [this](const Departed& departed) { spread_departure(departed); },
                        [this](Waiting& waiting) { put(ReportWaiting{std::move(waiting)}); }, [](const auto&) {}},
             event.message);
}

void Core::on(Leave) {
  if (std::exchange(left_, true)) return;
  mismatches_.stop();
  announce_leavers();
  for (const int peer : linked()) {
    send(peer, Leaving{});
    put(Close{peer});
  }
  links_.clear();
}

// ---- Messages

// Ends the connection of a peer that names a rank outside the world.
bool Core::cannot_be_about(int from, std::int32_t rank) {
  if (rank >= 0 && rank < size()) return false;
  lose(from, fmt::format("its connection brought a control message about rank {}", rank));
  return true;
}

void Core::take(int, const Heartbeat&) {}

void Core::take(int from, const Leaving&) { mark_left(from); }

void Core::take(int from, const Lost& message) {
  if (cannot_be_about(from, message.rank)) return;
  const bool from_leader = from == leader_;
  if (message.rank == rank_)
    return from_leader ? exclude(message.text) : lose(from, "it has declared this rank lost: " + message.text);
  // What an earlier leader told only some ranks, the others learn from the next leader.
  if (from_leader || is_leader()) return mark_lost(message.rank, message.text);
  claims_.emplace(message.rank, message.text);
}

void Core::take(int from, const Left& message) {
  if (!cannot_be_about(from, message.rank) && from == leader_ && message.rank != rank_) mark_left(message.rank);
}

void Core::take(int from, const Gone& message) {
  if (!cannot_be_about(from, message.rank) && from == leader_ && message.rank != rank_) mark_gone(message.rank);
}

void Core::take(int from, Abort& message) {
  if (from == leader_) {
    reported_.erase(message.group);
    if (failed_.emplace(message.group, message).second) put(ReportAborted{std::move(message)});
    return;
  }
  message.origin = from;
  early_.push_back(std::move(message));
  if (is_leader()) report_early_aborts();
}

void Core::take(int from, QueryCall& message) { put(LookUpCall{.asker = from, .query = std::move(message)}); }

void Core::take(int, CallReply& message) {
  if (!is_leader()) return;
  mismatches_.answered({.seq = message.seq, .group = message.group},
                       {.rank = message.rank, .call = std::move(message.call), .place = std::move(message.place)});
}

void Core::take(int, const CallPending& message) {
  if (is_leader()) mismatches_.answered({.seq = message.seq, .group = message.group}, {.rank = message.rank});
}

void Core::take(int from, Waiting& message) {
  for (const std::int32_t waited_for : message.members) {
    if (cannot_be_about(from, waited_for)) return;
  }
  if (is_leader()) put(ReportWaiting{std::move(message)});
}

void Core::take(int from, QueryProgress& message) { put(LookUpProgress{.asker = from, .query = std::move(message)}); }

void Core::take(int, ProgressReply& message) { put(ReportProgress{std::move(message)}); }

void Core::take(int from, const Departed& message) {
  if (cannot_be_about(from, message.rank) || message.rank == rank_) return;
  put(ReportDeparted{message});
  if (from != leader_) spread_departure(message);
}

void Core::take(int from, const Compare& message) {
  for (const std::int32_t member : message.members) {
    if (cannot_be_about(from, member)) return;
  }
  if (is_leader()) compare_calls(message);
}

void Core::take(int from, const QueryAlive&) { send(from, Alive{}); }

void Core::take(int from, const Alive&) { pass_on_doubtful(from); }

}  // namespace maniple::detector
