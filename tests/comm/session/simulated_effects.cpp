// What the simulated cores want done, and the rules that hold at every moment.
#include <algorithm>

#include <fmt/format.h>

#include "comm/session/simulated_world.h"

namespace maniple::harness {

namespace d = detector;

void SimulatedWorld::handle(int rank, d::Event event) {
  if (!broken_.empty()) return;
  const bool relayed = std::holds_alternative<d::Received>(event);
  produced_.clear();
  process(rank).core->handle(std::move(event), time(now_), produced_);
  check_effects(rank);
  for (d::Effect& effect : produced_) effects_.push_back({rank, relayed, std::move(effect)});
  if (std::exchange(executing_, true)) return;
  for (std::size_t i = 0; i < effects_.size(); ++i) {
    Pending pending = std::move(effects_[i]);
    if (process(pending.rank).state == State::dead) continue;
    execute(pending.rank, pending.effect, pending.relayed);
  }
  effects_.clear();
  executing_ = false;
  check_timers(rank);
}

void SimulatedWorld::check_effects(int rank) {
  const auto& departures = process(rank).core->departures();
  const auto has_left = [&](int peer) {
    const auto it = departures.find(peer);
    return it != departures.end() && std::holds_alternative<d::Left>(it->second);
  };
  for (const d::Effect& effect : produced_) {
    if (const auto* send = std::get_if<d::Send>(&effect); send != nullptr && has_left(send->to))
      fail(fmt::format("rank {} sends message {} to rank {}, which has left", rank, send->message.index(), send->to));
    if (const auto* dial = std::get_if<d::Dial>(&effect); dial != nullptr && departures.count(dial->to) != 0)
      fail(fmt::format("rank {} dials rank {}, which is gone", rank, dial->to));
    if (const auto* probe = std::get_if<d::Probe>(&effect); probe != nullptr && departures.count(probe->peer) != 0)
      fail(fmt::format("rank {} probes rank {}, which is gone", rank, probe->peer));
  }
}

// Nothing waits without a timer.
void SimulatedWorld::check_timers(int rank) {
  const Process& it = process(rank);
  if (!runs(rank) || it.core->is_excluded()) return;
  const auto due = it.core->due();
  if (due && it.wake_at > seconds(*due) + 1e-5) fail(fmt::format("rank {} waits without a wake-up call", rank));
  if (!due && options_.heartbeat_s > 0) fail(fmt::format("rank {} waits without a timer", rank));
  if (!due && !it.core->is_idle() && open_dials_.count({rank, it.dial}) == 0)
    fail(fmt::format("rank {} waits for something without a timer", rank));
}

char SimulatedWorld::state_of(int rank) const {
  const Process& it = process(rank);
  if (it.vanished || it.state == State::dead || it.state == State::left) return '\0';
  return it.held_until > now_ ? it.held_as : 'S';
}

void SimulatedWorld::execute(int rank, d::Effect& effect, bool relayed) {
  Process& it = process(rank);
  std::visit(
      overloaded{[&](const d::Send& send_effect) {
                   if (it.dies_after == 0) return kill(rank);
                   send(rank, send_effect);
                   const bool spreads = std::holds_alternative<d::Lost>(send_effect.message) ||
                                        std::holds_alternative<d::Abort>(send_effect.message) ||
                                        std::holds_alternative<d::Gone>(send_effect.message) ||
                                        std::holds_alternative<d::Survivors>(send_effect.message);
                   if (spreads && it.dies_after > 0) --it.dies_after;
                 },
                 [&](const d::Close& close) {
                   if (const auto link = it.links.extract(close.peer)) end(link.mapped(), side_of(link.mapped(), rank));
                 },
                 [&](const d::Dial& dial_effect) {
                   note(rank, fmt::format("dials rank {}", dial_effect.to));
                   open_dials_.erase({rank, it.dial});
                   dial(rank, dial_effect);
                 },
                 [&](const d::Probe& probe) {
                   if (listens(probe.peer) || process(probe.peer).vanished || !it.probing.insert(probe.peer).second)
                     return;
                   const double there = passes_at(rank, probe.peer, now_ + delay());
                   const double back = passes_at(probe.peer, rank, there + delay());
                   if (back < kForever) push({.at = back, .kind = Kind::refused, .rank = rank, .peer = probe.peer});
                 },
                 [&](const d::ReadProcessState& read) {
                   handle(rank, d::ProcessState{.peer = read.peer, .state = state_of(read.peer)});
                 },
                 [&](d::LookUpCall& look) {
                   RankCall call{.rank = rank};
                   if (const auto made = it.calls.find(look.query.seq); made != it.calls.end())
                     call.call = made->second;
                   handle(rank,
                          d::CallFound{.asker = look.asker, .query = std::move(look.query), .call = std::move(call)});
                 },
                 [&](d::ReportLost& report) {
                   note(rank, "reports: " + report.text);
                   check_loss(rank, report, relayed);
                   it.lost[report.rank].push_back(std::move(report.text));
                   if (on_failure_) on_failure_(rank);
                 },
                 [&](const d::ReportGone& report) {
                   note(rank, fmt::format("reports: rank {} is gone", report.rank));
                   ++it.gone[report.rank];
                 },
                 [&](d::ReportAborted& report) {
                   note(rank, fmt::format("reports: {} failed: {}", report.abort.group, report.abort.error.reason));
                   it.aborted[report.abort.group].push_back(std::move(report.abort.error));
                   if (on_failure_) on_failure_(rank);
                 },
                 [&](const d::ReportSurvivors& report) { decide(rank, report.decision); },
                 [&](const d::WakeAt& wake) {
                   const double when = seconds(wake.when) + 2e-6;
                   it.wake_at = std::min(it.wake_at, when);
                   push({.at = when, .kind = Kind::wake, .rank = rank});
                 },
                 [](const auto&) {}},
      effect);
}

void SimulatedWorld::shrink(int rank) {
  Process& it = process(rank);
  if (!runs(rank) || it.shrinks) return;
  it.shrinks = d::Shrink{.rank = rank, .group = "g0"};
  for (int r = 0; r < size(); ++r) it.shrinks->members.push_back(r);
  handle(rank, d::ShrinkHere{*it.shrinks});
}

void SimulatedWorld::decide(int rank, const d::Survivors& decision) {
  Process& it = process(rank);
  note(rank, fmt::format("reports: {} survivors in round {}{}", decision.members.size(), decision.seq,
                         decision.confirmed ? ", confirmed" : ""));
  if (it.survived) return fail(fmt::format("rank {} gets a second decision about the survivors", rank));
  if (std::count(decision.members.begin(), decision.members.end(), rank) == 0)
    return fail(fmt::format("rank {} gets a group without it", rank));
  if (decision.confirmed && it.shrinks->made && decision.seq == it.shrinks->seq) {
    if (decision.members != it.made) fail(fmt::format("rank {} is to use another group than it has made", rank));
    it.survived = decision;
    return;
  }
  at(now_ + delay(), [this, rank, decision] { make_group(rank, decision); });
}

// With a dead member a group may be made on some ranks, if it died late.
void SimulatedWorld::make_group(int rank, const d::Survivors& decision) {
  Process& it = process(rank);
  if (!runs(rank)) return;
  if (it.held_until > now_) {
    if (it.held_until < kForever) at(it.held_until + 0.001, [this, rank, decision] { make_group(rank, decision); });
    return;
  }
  const bool all_run = std::all_of(decision.members.begin(), decision.members.end(), [this](int r) { return runs(r); });
  it.shrinks->seq = decision.seq;
  it.made = decision.members;
  it.shrinks->made = random() < (all_run ? 0.9 : 0.3);
  handle(rank, d::ShrinkHere{*it.shrinks});
}

// A starved process is seen to be alive on its own host. If it leads ranks of other hosts, they decide.
bool SimulatedWorld::is_seen_alive(int rank, int other) const {
  const auto& departures = process(rank).core->departures();
  const auto host = [this](int r) { return options_.hosts[static_cast<std::size_t>(r)]; };
  if (host(rank) != host(other) || state_of(other) == '\0' || state_of(other) == 'T') return false;
  bool led = true, is_alone = true;
  for (int r = 0; r < size(); ++r) {
    if (r < other && departures.count(r) == 0) led = false;
    if (host(r) != host(rank) && departures.count(r) == 0) is_alone = false;
  }
  return !led || is_alone;
}

// No rank is declared dead while its heartbeats arrive.
void SimulatedWorld::check_loss(int rank, const d::ReportLost& report, bool relayed) {
  const Process& it = process(rank);
  if (const auto known = it.lost.find(report.rank); known != it.lost.end())
    fail(fmt::format("rank {} learns twice that rank {} is lost: {}; {}", rank, report.rank, known->second.front(),
                     report.text));
  if (relayed || report.text.find("no heartbeat") == std::string::npos) return;
  for (const Process& other : processes_) {  // a claim that came before this rank led
    if (const auto known = other.lost.find(report.rank);
        known != other.lost.end() && known->second.front() == report.text)
      return;
  }
  const auto heard = it.heard.find(report.rank);
  const double silence = heard == it.heard.end() ? now_ : now_ - heard->second;
  const double limit = options_.heartbeat_s * (is_seen_alive(rank, report.rank) ? 10 : 1);
  if (silence < limit * 0.999)
    fail(fmt::format("rank {} declares rank {} lost, which it heard {:.2f} s ago: {}", rank, report.rank, silence,
                     report.text));
}

std::string SimulatedWorld::why_not_quiet() const {
  if (under_way_ != 0) return "messages are under way";
  for (const auto& [rank, dial] : open_dials_) {
    if (process(rank).held_until < kForever) return fmt::format("rank {} dials", rank);
  }
  std::vector<int> present;
  for (int r = 0; r < size(); ++r) {
    const Process& it = process(r);
    if (it.state == State::joining || it.state == State::leaving) return fmt::format("rank {} joins or leaves", r);
    if (!runs(r) || it.core->is_excluded() || it.held_until >= kForever) continue;
    if (it.held_until > now_) return fmt::format("rank {} is held", r);
    present.push_back(r);
  }
  for (const int r : present) {
    const d::Core& core = *process(r).core;
    if (!core.is_idle()) return fmt::format("rank {} is not idle", r);
    const bool all_shrink =
        std::all_of(present.begin(), present.end(), [this](int p) { return process(p).shrinks.has_value(); });
    if (all_shrink && !process(r).survived) return fmt::format("rank {} does not know which ranks survive", r);
    for (int other = 0; other < size(); ++other) {
      const bool is_present = std::count(present.begin(), present.end(), other) != 0;
      if (!is_present && core.departures().count(other) == 0)
        return fmt::format("rank {} does not know that rank {} is gone", r, other);
      if (is_present && core.departures().count(other) != process(other).core->departures().count(r))
        return fmt::format("rank {} and rank {} disagree about each other", r, other);
    }
    const int leader = core.leader();
    if (leader == r) continue;
    if (!process(leader).core->is_leader()) return fmt::format("the leader {} of rank {} does not lead", leader, r);
    if (!core.is_linked(leader) || !process(leader).core->is_linked(r))
      return fmt::format("rank {} is not connected to its leader {}", r, leader);
  }
  return {};
}

bool SimulatedWorld::run_until_quiet(double limit) {
  while (broken_.empty()) {
    run(now_ + 0.5);
    if (!broken_.empty() || why_not_quiet().empty()) return broken_.empty();
    if (now_ >= limit) return false;
  }
  return false;
}

}  // namespace maniple::harness
