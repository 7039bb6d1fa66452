#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "comm/base/log.h"
#include "comm/net/address.h"
#include "comm/session/failure_detector_impl.h"

namespace maniple {
namespace {

using Kind = DetectorMessage::Kind;

constexpr std::chrono::milliseconds kLeaverBatch{50};  // departures within this time are announced in one batch
constexpr std::chrono::milliseconds kFirstCheck{100};  // first check of ranks that have not connected to a new leader
constexpr std::chrono::milliseconds kCheckPeriod{250};

double seconds(Deadline::Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

void FailureDetector::Impl::lose(int peer, const std::string& why) {
  mark_lost(peer, fmt::format("{} is lost: {}", name(peer), why));
}

void FailureDetector::Impl::mark_lost(int peer, const std::string& text) {
  const DetectorMessage message = message_about(Kind::lost, peer, text);
  if (!gone.emplace(peer, message).second) return;
  if (const auto link = take(peer)) link->send(message);  // if the rank lives after all, it learns that it is excluded
  if (is_leader()) send_all(message);
  events.lost(peer, text);
  pass_on_doubtful(peer);
  elect();
}

// Records that `peer` left in good order.
void FailureDetector::Impl::mark_left(int peer) {
  take(peer);
  if (!gone.emplace(peer, message_about(Kind::left, peer, name(peer) + " has left")).second) return;
  if (is_leader()) {
    leavers.push_back(peer);
    if (leavers.size() == 1) call_later(kLeaverBatch, [](Impl& self) { self.announce_leavers(); });
  }
  pass_on_doubtful(peer);
  elect(true);
}

void FailureDetector::Impl::announce_leavers() {
  for (const int leaver : leavers) send_all(gone.at(leaver));
  leavers.clear();
}

// Records that `peer` left or ended while the leader changed: any message it sent to the old leader is lost.
void FailureDetector::Impl::mark_gone(int peer) {
  take(peer);
  const DetectorMessage message = message_about(Kind::gone, peer, name(peer) + " is gone");
  if (!gone.emplace(peer, message).second) return;
  if (is_leader()) send_all(message);
  events.gone(peer);
  pass_on_doubtful(peer);
  elect();
}

void FailureDetector::Impl::on_excluded(const std::string& text) {
  excluded = true;
  links.clear();
  awaited.clear();
  events.lost(rank, "the other ranks have declared this one lost: " + text);
}

// Returns why a rank that has been silent for `silence` seconds counts as lost, or nothing if it does not yet.
std::optional<std::string> FailureDetector::Impl::silence_of(int peer, double silence) const {
  if (heartbeat_s <= 0 || silence < heartbeat_s) return std::nullopt;
  const char state = same_host(peer) ? process_state(info(peer).pid) : '\0';
  if (state == 'T' || state == 't') return fmt::format("its process is stopped (no heartbeat for {:.1f} s)", silence);
  if (state != '\0' && silence < heartbeat_s * 10) return std::nullopt;
  return fmt::format("no heartbeat for {:.1f} s (stopped, overloaded, or cut off)", silence);
}

void FailureDetector::Impl::tick() {
  const auto now = Clock::now();
  const double period_s = heartbeat_s / 10;
  std::vector<std::pair<int, std::string>> silent;
  for (const auto& [peer, link] : links) {
    link->silence().look(seconds(now - last_tick), period_s, link->heard() >= last_tick);
    if (const auto why = silence_of(peer, link->silence().seconds())) silent.emplace_back(peer, *why);
  }
  last_tick = now;
  for (const auto& [peer, why] : silent) lose(peer, why);
  send_all(message_about(Kind::heartbeat, rank));
  call_later(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(period_s)),
             [](Impl& self) { self.tick(); });
}

// ---- The leader

void FailureDetector::Impl::elect(bool in_good_order) {
  if (stopped || excluded) return;
  int next = 0;
  while (gone.count(next) != 0) ++next;  // ends at this rank
  if (next == leader) return;
  leader = next;
  if (is_leader()) return become_leader();
  // The delay spares needless connections when all ranks leave at the end of a large job.
  constexpr std::chrono::microseconds kPerRank{100};
  constexpr std::chrono::microseconds kMost{100'000};
  dial_leader(in_good_order ? std::min(kMost, kPerRank * size()) : std::chrono::microseconds(0));
}

void FailureDetector::Impl::become_leader() {
  log_debug("rank {} leads the failure detector now", rank);
  for (int r = 0; r < size(); ++r) {
    if (r != rank && gone.count(r) == 0 && links.count(r) == 0) awaited[r] = Silence();
  }
  schedule_check(kFirstCheck);
  for (const auto& [peer, link] : links) send_departures(*link);
  for (auto& [group, message] : reported) {
    early.push_back(message);
    early.back().origin = rank;
  }
  reported.clear();
  report_early_aborts();
}

void FailureDetector::Impl::schedule_check(Clock::duration delay) {
  if (std::exchange(check_scheduled, true)) return;
  last_check = Clock::now();
  check_delay = delay;
  call_later(delay, [](Impl& self) { self.check_awaited(); });
}

// Checks whether ranks that have not connected to this leader still exist.
void FailureDetector::Impl::check_awaited() {
  check_scheduled = false;
  const auto elapsed = Clock::now() - last_check;
  // During init, connections of seemingly missing ranks may be waiting to be accepted.
  const bool held_up = init_deadline && elapsed > check_delay * 4;
  for (auto& [peer, silence] : awaited) silence.look(seconds(elapsed), seconds(check_delay), false);
  const auto missing = awaited;
  for (const auto& [peer, unheard] : missing) {
    if (held_up || gone.count(peer) != 0) continue;
    const auto silence = silence_of(peer, unheard.seconds());
    if (init_deadline ? init_deadline->expired() : silence.has_value()) {
      lose(peer, init_deadline ? "it never connected during init" : *silence);
      continue;
    }
    probes->start(peer, Address::parse(same_host(peer) ? info(peer).unix_address : info(peer).tcp_address),
                  [this, sought = peer] {
                    if (stopped || awaited.count(sought) == 0) return;
                    if (init_deadline) return lose(sought, "its process ended during init, before it connected");
                    mark_gone(sought);
                  });
  }
  if (awaited.empty()) {
    init_deadline.reset();
  } else {
    schedule_check(init_deadline ? kCheckPeriodDuringInit : kCheckPeriod);
  }
}

void FailureDetector::Impl::dial_leader(std::chrono::microseconds delay) {
  const int target = leader;
  const auto self = shared_from_this();  // the thread ends before this object does: PeerDialer joins it
  PeerDialer::Task task;
  task.delay = delay;
  const std::chrono::duration<double> one_try(heartbeat_s > 0 ? heartbeat_s * 0.9 : 20);
  task.one_try = std::chrono::duration_cast<Clock::duration>(one_try);
  task.dial = [this, target](Deadline deadline, int cancel) { return events.dial(target, deadline, cancel); };
  task.hopeless = [this, target](double tried_s) { return silence_of(target, tried_s).has_value(); };
  task.done = [self, target](PeerDialer::Result result) {
    auto shared = std::make_shared<PeerDialer::Result>(std::move(result));
    self->loop->post([self, target, shared] { self->on_dialed(target, *shared); });
  };
  dialer = std::make_unique<PeerDialer>(std::move(task));
}

void FailureDetector::Impl::on_dialed(int target, PeerDialer::Result& result) {
  if (stopped) {
    if (result.connection) DetectorLink(loop, std::move(result.connection)).send(message_about(Kind::leaving, rank));
    return;
  }
  if (excluded || target != leader) return;
  if (result.connection) {
    link(target, std::move(result.connection));
    for (const auto& [group, message] : reported) send(target, message);
  } else if (result.refused) {
    mark_gone(target);
  } else {
    lose(target, "it cannot be reached: " + result.why);
  }
}
}  // namespace maniple
