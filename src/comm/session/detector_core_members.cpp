// Lost, departed and silent ranks, and the succession of leaders, in the failure detector's core.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "comm/session/detector_core.h"

namespace maniple::detector {
namespace {

constexpr std::chrono::milliseconds kLeaverBatch{50};  // departures within this time are announced in one batch
constexpr std::chrono::milliseconds kFirstCheck{100};  // first check of ranks that have not connected to a new leader
constexpr std::chrono::milliseconds kCheckPeriod{250};
constexpr std::chrono::milliseconds kRedialPause{50};
constexpr double kTryWithoutHeartbeat_s = 20;  // time limit of one dial if ranks may be silent

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

Clock::duration from_seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}

}  // namespace

// A rank that takes this one for the leader may be lost before the leader hears of it.
void Core::lose(int peer, const std::string& why) {
  const std::string text = fmt::format("{} is lost: {}", member(peer).name, why);
  mark_lost(peer, text);
  if (!is_leader()) send(leader_, Lost{.rank = peer, .text = text});
}

// A rank that was known to be gone may turn out to be lost: another rank knew how it ended.
void Core::mark_lost(int peer, const std::string& text) {
  const auto [it, is_news] = gone_.try_emplace(peer, Lost{.rank = peer, .text = text});
  if (!is_news) {
    if (!std::holds_alternative<Gone>(it->second)) return;
    it->second = Lost{.rank = peer, .text = text};
  }
  if (unlink(peer)) {
    // If the rank lives after all, it learns that it is excluded.
    put(Send{.to = peer, .message = it->second});
    put(Close{peer});
  }
  if (is_leader()) send_all(it->second);
  put(ReportLost{.rank = peer, .text = text});
  pass_on_doubtful(peer);
  elect();
}

// Records that `peer` left in good order.
void Core::mark_left(int peer) {
  if (unlink(peer)) put(Close{peer});
  if (!gone_.try_emplace(peer, Left{peer}).second) return;
  if (is_leader()) {
    leavers_.push_back(peer);
    if (leavers_.size() == 1) announce_at_ = now_ + kLeaverBatch;
  }
  pass_on_doubtful(peer);
  elect(true);
}

void Core::announce_leavers() {
  announce_at_.reset();
  for (const int leaver : std::exchange(leavers_, {})) send_all(gone_.at(leaver));
}

// Records that `peer` left or ended while the leader changed: any message it sent to the old leader is lost.
void Core::mark_gone(int peer) {
  if (unlink(peer)) put(Close{peer});
  if (!gone_.try_emplace(peer, Gone{peer}).second) return;
  if (is_leader()) send_all(Gone{peer});
  put(ReportGone{peer});
  pass_on_doubtful(peer);
  elect();
}

void Core::exclude(const std::string& text) {
  excluded_ = true;
  for (const int peer : linked()) put(Close{peer});
  links_.clear();
  awaited_.clear();
  dialing_.reset();
  put(ReportLost{.rank = rank_, .text = "the other ranks have declared this one lost: " + text});
}

// Returns why a rank that has been silent for `silence` seconds counts as lost, or nothing if it does not yet.
std::optional<std::string> Core::silence_of(double silence, char state) const {
  if (!is_silent(silence)) return std::nullopt;
  if (state == 'T' || state == 't') return fmt::format("its process is stopped (no heartbeat for {:.1f} s)", silence);
  if (state != '\0' && silence < heartbeat_s_ * 10) return std::nullopt;
  return fmt::format("no heartbeat for {:.1f} s (stopped, overloaded, or cut off)", silence);
}

// How long this leader waits for ranks to connect. They may not have been told that an earlier leader is lost, and then
// each dials it twice before it turns to the next one.
double Core::connect_limit_s() const {
  int silent = 0;
  for (const auto& [rank, departure] : gone_) silent += rank < rank_ && std::holds_alternative<Lost>(departure) ? 1 : 0;
  return heartbeat_s_ * (1 + 2 * silent);
}

// A silent rank of this host may only be starved of processor time.
void Core::suspect(int peer) { member(peer).same_host ? put(ReadProcessState{peer}) : judge(peer, '\0'); }

// Ranks on other hosts do not see that a leader is only starved. All must follow the same leader, so this rank waits as
// long as they do.
bool Core::is_judged_elsewhere(int peer) const {
  if (peer != leader_) return false;
  for (int r = 0; r < size(); ++r) {
    if (!member(r).same_host && gone_.count(r) == 0) return true;
  }
  return false;
}

// Decides about a rank that is connected, awaited or dialled and may have been silent for too long.
void Core::judge(int peer, char state) {
  if (state != 'T' && state != 't' && is_judged_elsewhere(peer)) state = '\0';
  if (const auto it = links_.find(peer); it != links_.end()) {
    if (const auto why = silence_of(it->second.silence.seconds(), state)) lose(peer, *why);
  } else if (const auto unheard = awaited_.find(peer); unheard != awaited_.end()) {
    const double silence = unheard->second.seconds();
    const bool is_stopped = state == 'T' || state == 't';
    const auto why = is_stopped || silence >= connect_limit_s() ? silence_of(silence, state) : std::nullopt;
    why ? lose(peer, *why) : put(Probe{peer});
  } else if (dialing_ && dialing_->to == peer) {
    if (silence_of(seconds(now_ - dialing_->since), state)) return lose(peer, "it cannot be reached: " + dialing_->why);
    dial_leader(kRedialPause);
  }
}

void Core::beat() {
  const double period_s = heartbeat_s_ / 10;
  std::vector<int> silent;
  for (auto& [peer, link] : links_) {
    link.silence.look(seconds(now_ - last_beat_), period_s, link.heard >= last_beat_);
    if (is_silent(link.silence.seconds())) silent.push_back(peer);
  }
  last_beat_ = now_;
  for (const int peer : silent) suspect(peer);
  if (excluded_) return;
  send_all(Heartbeat{});
  beat_at_ = now_ + from_seconds(period_s);
}

// ---- The leader

void Core::elect(bool in_good_order) {
  if (left_ || excluded_) return;
  int next = 0;
  while (gone_.count(next) != 0) ++next;  // ends at this rank
  if (next == leader_) return;
  leader_ = next;
  dialing_.reset();
  if (is_leader()) return become_leader();
  // The delay spares needless connections when all ranks leave at the end of a large job.
  constexpr std::chrono::microseconds kPerRank{100};
  constexpr std::chrono::microseconds kMost{100'000};
  dial_leader(in_good_order ? std::min(kMost, kPerRank * size()) : std::chrono::microseconds(0));
}

void Core::become_leader() {
  for (int r = 0; r < size(); ++r) {
    if (r != rank_ && gone_.count(r) == 0 && !is_linked(r)) awaited_[r] = Silence();
  }
  schedule_check(kFirstCheck);
  for (const int peer : linked()) brief(peer);
  for (const auto& [rank, text] : std::exchange(claims_, {})) mark_lost(rank, text);
  for (auto& [group, abort] : std::exchange(reported_, {})) {
    early_.push_back(abort);
    early_.back().origin = rank_;
  }
  report_early_aborts();
  for (const auto& [group, request] : survivors_.own()) survivors_.take(request);
}

void Core::schedule_check(Clock::duration delay) {
  if (check_at_) return;
  last_check_ = now_;
  check_delay_ = delay;
  check_at_ = now_ + delay;
}

// Checks whether ranks that have not connected to this leader still exist.
void Core::check_awaited() {
  check_at_.reset();
  const auto elapsed = now_ - last_check_;
  // During init, connections of seemingly missing ranks may be waiting to be accepted.
  const bool held_up = init_until_ && elapsed > check_delay_ * 4;
  std::vector<int> missing;
  for (auto& [peer, silence] : awaited_) {
    silence.look(seconds(elapsed), seconds(check_delay_), false);
    missing.push_back(peer);
  }
  if (held_up) missing.clear();
  for (const int peer : missing) {
    if (init_until_ && now_ >= *init_until_) {
      lose(peer, "it never connected during init");
    } else if (!init_until_ && is_silent(awaited_.at(peer).seconds())) {
      suspect(peer);
    } else {
      put(Probe{peer});
    }
  }
  if (awaited_.empty()) {
    init_until_.reset();
  } else {
    schedule_check(init_until_ ? kCheckPeriodDuringInit : kCheckPeriod);
  }
}

void Core::dial_leader(Clock::duration delay) {
  if (!dialing_) dialing_ = Dialing{.to = leader_, .since = now_};
  put(Dial{.to = leader_,
           .delay = delay,
           .limit = from_seconds(heartbeat_s_ > 0 ? heartbeat_s_ * 0.9 : kTryWithoutHeartbeat_s)});
}

}  // namespace maniple::detector
