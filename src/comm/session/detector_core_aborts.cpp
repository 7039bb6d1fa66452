// Aborts in the failure detector's core: the leader passes the first one of each group on to all ranks.
#include <algorithm>
#include <utility>

#include "comm/session/detector_core.h"

namespace maniple::detector {

void Core::report_abort(const Abort& abort) {
  if (!is_leader()) {
    reported_[abort.group] = abort;
    return send(leader_, abort);
  }
  const std::string& group = abort.group;
  // Only the first abort counts.
  if (mismatches_.is_open(group) || failed_.count(group) != 0 || doubtful_.count(group) != 0) return;
  if (!asks_whether_alive(abort.error) || !is_linked(abort.error.ranks.front())) return pass_on(abort);
  doubtful_[group] = {.abort = abort, .until = now_ + kAliveLimit};
  send(abort.error.ranks.front(), QueryAlive{});
}

void Core::pass_on(const Abort& abort) {
  if (!asks_for_calls(abort.error, abort.seq)) return broadcast_abort(abort);
  mismatches_.begin(abort, linked(), now_, *effects_);
}

// By now all ranks know how `peer` was lost, if it was.
void Core::pass_on_doubtful(int peer) {
  std::vector<Abort> known;
  for (const auto& [group, doubtful] : doubtful_) {
    if (doubtful.abort.error.ranks.front() == peer) known.push_back(doubtful.abort);
  }
  for (const Abort& abort : known) {
    doubtful_.erase(abort.group);
    pass_on(abort);
  }
}

void Core::report_early_aborts() {
  for (const Abort& abort : std::exchange(early_, {})) report_abort(abort);
}

// The reporting rank receives the abort after the others, so that they know when its call ends. The leader itself is
// last: its program may end at once, and the thread that sends with it.
void Core::broadcast_abort(const Abort& abort) {
  if (!failed_.emplace(abort.group, abort).second) return;
  for (const auto& [peer, link] : links_) {
    if (peer != abort.origin) put(Send{.to = peer, .message = abort});
  }
  send(abort.origin, abort);
  put(ReportAborted{abort});
}

void Core::broadcast_finished() {
  for (const Abort& abort : mismatches_.take_finished()) {
    if (!left_ && !excluded_) broadcast_abort(abort);
  }
}

void Core::compare_calls(const Compare& message) {
  if (failed_.count(message.group) == 0) mismatches_.compare(message, linked(), now_, *effects_);
}

void Core::spread_departure(const Departed& message) {
  for (const auto& [peer, link] : links_) {
    if (peer != message.rank) put(Send{.to = peer, .message = message});
  }
}

// ---- Survivors

void Core::on(ShrinkHere event) {
  if (left_ || excluded_) return;
  survivors_.request(event.request);
  if (is_leader()) return survivors_.take(event.request);
  send(leader_, std::move(event.request));
}

void Core::on(CancelShrinkHere event) {
  if (left_ || excluded_) return;
  survivors_.cancel(event.group);
  const CancelShrink message{.rank = rank_, .group = event.group};
  if (!is_leader()) return send(leader_, message);
  put(ReportMissing{survivors_.take(message, gone_)});
}

// Ends the connection of a peer that names ranks outside the world.
bool Core::cannot_be_members(int from, const std::vector<std::int32_t>& ranks) {
  return std::any_of(ranks.begin(), ranks.end(), [&](std::int32_t rank) { return cannot_be_about(from, rank); });
}

void Core::take(int from, const Shrink& message) {
  if (message.rank == from && !cannot_be_members(from, message.members)) survivors_.take(message);
}

void Core::take(int from, const Survivors& message) {
  if (cannot_be_members(from, message.members)) return;
  if (from != leader_) return survivors_.adopt(message);
  if (survivors_.decided(message)) put(ReportSurvivors{message});
}

void Core::take(int from, const CancelShrink& message) {
  if (message.rank == from) send(from, survivors_.take(message, gone_));
}

void Core::take(int from, Missing& message) {
  if (from == leader_ && !cannot_be_members(from, message.members)) put(ReportMissing{std::move(message)});
}

// A decision about this rank comes out as ReportSurvivors, like a decision of another leader.
void Core::decide_survivors() {
  if (left_ || excluded_ || !is_leader()) return;
  Effects decisions;
  survivors_.decide(gone_, decisions);
  for (Effect& effect : decisions) {
    if (const auto* send_effect = std::get_if<Send>(&effect)) {
      send(send_effect->to, send_effect->message);
    } else if (const auto* own = std::get_if<ReportSurvivors>(&effect);
               own != nullptr && survivors_.decided(own->decision)) {
      put(*own);
    }
  }
}

}  // namespace maniple::detector
