#include "comm/session/failure_detector.h"

#include <utility>

#include <fmt/format.h>

#include "comm/base/log.h"
#include "comm/net/address.h"
#include "comm/session/failure_detector_impl.h"

namespace maniple {
namespace {

using Kind = DetectorMessage::Kind;

constexpr std::chrono::milliseconds kAliveLimit{1500};  // time to reply to query_alive

}  // namespace

void FailureDetector::Impl::adopt(int peer, SecureConnection connection) {
  if (stopped || excluded) return;
  if (const auto it = gone.find(peer); it != gone.end()) {
    DetectorLink(loop, std::move(connection)).send(message_about(Kind::lost, peer, it->second.text));
    return;
  }
  link(peer, std::move(connection));
}

void FailureDetector::Impl::link(int peer, SecureConnection connection) {
  set_liveness(connection.get(), heartbeat_s);
  retransmit_steadily(connection.get());
  auto link = std::make_shared<DetectorLink>(loop, std::move(connection));
  links[peer] = link;
  awaited.erase(peer);
  const std::weak_ptr<Impl> weak = weak_from_this();
  link->open({.message =
                  [weak, peer](const DetectorMessage& message) {
                    const auto self = weak.lock();
                    if (self && !self->stopped && !self->excluded) self->on_message(peer, message);
                  },
              .closed =
                  [weak, peer](const std::string& why) {
                    const auto self = weak.lock();
                    if (self && !self->stopped && !self->excluded) self->on_closed(peer, why);
                  }});
  link->send(message_about(Kind::heartbeat, rank));
  if (is_leader()) send_departures(*link);
}

void FailureDetector::Impl::on_closed(int peer, const std::string& why) {
  // A rank that leaves while it dials a new leader may close a connection that has been accepted already. (During init,
  // when rank 0 is the leader, no rank leaves in good order.)
  const auto it = links.find(peer);
  const bool changing = rank != 0 && peer != 0;
  if (changing && it != links.end() && !it->second->has_received()) return mark_gone(peer);
  lose(peer, why);
}

// A rank may have missed departures that its new leader knows of.
void FailureDetector::Impl::send_departures(DetectorLink& link) {
  for (const auto& [r, message] : gone) link.send(message);
}

std::shared_ptr<DetectorLink> FailureDetector::Impl::take(int peer) {
  awaited.erase(peer);
  const auto it = links.find(peer);
  if (it == links.end()) return nullptr;
  auto link = std::move(it->second);
  links.erase(it);
  return link;
}

void FailureDetector::Impl::send(int peer, const DetectorMessage& message) {
  if (const auto it = links.find(peer); it != links.end()) it->second->send(message);
}

void FailureDetector::Impl::send_all(const DetectorMessage& message) {
  for (const auto& [peer, link] : links) link->send(message);
}

void FailureDetector::Impl::on_message(int peer, const DetectorMessage& message) {
  const bool from_leader = peer == leader;
  const auto require_rank = [&] {
    if (message.rank < 0 || message.rank >= size())
      throw ProtocolError(fmt::format("a control message about rank {}", message.rank));
  };
  switch (message.kind) {
    case Kind::heartbeat: return;
    case Kind::leaving: return mark_left(peer);
    case Kind::lost:
      require_rank();
      if (message.rank == rank)
        return from_leader ? on_excluded(message.text) : lose(peer, "it has declared this rank lost: " + message.text);
      if (from_leader) mark_lost(message.rank, message.text);
      return;
    case Kind::left:
      require_rank();
      if (from_leader && message.rank != rank) mark_left(message.rank);
      return;
    case Kind::gone:
      require_rank();
      if (from_leader && message.rank != rank) mark_gone(message.rank);
      return;
    case Kind::abort:
      if (from_leader) {
        reported.erase(message.group);
        return events.aborted(message);
      }
      early.push_back(message);
      early.back().origin = peer;
      if (is_leader()) report_early_aborts();
      return;
    case Kind::query_call: {
      DetectorMessage answer = message;
      answer.rank = rank;
      const RankCall call = events.called(message.group, message.seq);
      if (call.rank < 0) return;  // this rank is not in the group, or not yet
      answer.kind = call.call.empty() ? Kind::call_pending : Kind::call_reply;
      answer.text = call.call;
      answer.place = call.place;
      return send(peer, answer);
    }
    case Kind::call_reply:
    case Kind::call_pending:
      if (is_leader()) mismatches->answered(message);
      return;
    case Kind::query_alive: return send(peer, message_about(Kind::alive, rank));
    case Kind::alive: return pass_on_doubtful(peer);
    case Kind::waiting: return is_leader() ? events.waiting(message) : void();
    case Kind::query_progress: return send(peer, events.progress(message));
    case Kind::progress_reply: return events.progress_reply(message);
    case Kind::departed:
      require_rank();
      if (message.rank == rank) return;
      events.departed(message);
      if (!from_leader) spread_departure(message);
      return;
    case Kind::compare:
      if (is_leader()) compare_calls(message);
      return;
  }
}

// ---- Aborts

void FailureDetector::Impl::report_abort(const DetectorMessage& message) {
  if (stopped || excluded) return;
  if (!is_leader()) {
    reported[message.group] = message;
    return send(leader, message);
  }
  const std::string& group = message.group;
  // Only the first abort counts.
  if (mismatches->is_open(group) || failed.count(group) != 0 || doubtful.count(group) != 0) return;
  if (!asks_whether_alive(message.error) || links.count(message.error.ranks.front()) == 0) return pass_on(message);
  doubtful[group] = message;
  send(message.error.ranks.front(), message_about(Kind::query_alive, rank));
  call_later(kAliveLimit, [group](Impl& self) {
    if (const auto node = self.doubtful.extract(group)) self.pass_on(node.mapped());
  });
}

void FailureDetector::Impl::pass_on(const DetectorMessage& message) {
  failed.insert(message.group);
  if (!asks_for_calls(message.error, message.seq)) return broadcast_abort(message);
  mismatches->begin(message, linked());
}

// By now all ranks know how `peer` was lost, if it was.
void FailureDetector::Impl::pass_on_doubtful(int peer) {
  std::vector<DetectorMessage> known;
  for (const auto& [group, message] : doubtful) {
    if (message.error.ranks.front() == peer) known.push_back(message);
  }
  for (const DetectorMessage& message : known) {
    doubtful.erase(message.group);
    pass_on(message);
  }
}

std::vector<int> FailureDetector::Impl::linked() const {
  std::vector<int> ranks;
  for (const auto& [peer, link] : links) ranks.push_back(peer);
  return ranks;
}

void FailureDetector::Impl::compare_calls(const DetectorMessage& message) {
  if (failed.count(message.group) == 0) mismatches->compare(message, linked());
}

void FailureDetector::Impl::spread_departure(const DetectorMessage& message) {
  for (const auto& [peer, link] : links) {
    if (peer != message.rank) link->send(message);
  }
}

void FailureDetector::Impl::report_early_aborts() {
  for (const DetectorMessage& message : std::exchange(early, {})) report_abort(message);
}

void FailureDetector::Impl::broadcast_abort(const DetectorMessage& message) {
  if (stopped) return;
  // The reporting rank receives the abort after the others, so that they know when its call ends. The leader itself is
  // last: its program may end at once, and this thread with it.
  for (const auto& [peer, link] : links) {
    if (peer != message.origin) link->send(message);
  }
  send(message.origin, message);
  events.aborted(message);
}

void FailureDetector::Impl::start() {
  mismatches = std::make_shared<MismatchReports>(MismatchReports::Callbacks{
      .loop = loop,
      .rank = rank,
      .called = [this](const std::string& group, std::uint64_t seq) { return events.called(group, seq); },
      .send = [this](int peer, const DetectorMessage& message) { send(peer, message); },
      .finished =
          [this](const DetectorMessage& message) {
            failed.insert(message.group);
            broadcast_abort(message);
          }});
  probes = std::make_unique<ListenProbes>(loop);
  if (heartbeat_s > 0) loop->post([self = shared_from_this()] { self->stopped ? void() : self->tick(); });
}

void FailureDetector::Impl::stop() {
  stopped = true;
  mismatches->stop();
  probes->stop();
  announce_leavers();
  send_all(message_about(Kind::leaving, rank));
  links.clear();
}

FailureDetector::FailureDetector(std::shared_ptr<EventLoop> loop, int rank, std::vector<PeerInfo> peers,
                                 double heartbeat_s, Events events)
    : impl_(std::make_shared<Impl>()) {
  impl_->loop = std::move(loop);
  impl_->rank = rank;
  impl_->peers = std::move(peers);
  impl_->heartbeat_s = heartbeat_s;
  impl_->events = std::move(events);
  impl_->start();
}

FailureDetector::~FailureDetector() {
  impl_->loop->post_and_wait([impl = impl_] { impl->stop(); });
  impl_->dialer.reset();
  impl_->loop->post_and_wait([] {});  // the dialler's result has been handled
}

void FailureDetector::adopt(int rank, SecureConnection connection) {
  auto shared = std::make_shared<SecureConnection>(std::move(connection));
  impl_->loop->post_and_wait([impl = impl_, rank, shared] { impl->adopt(rank, std::move(*shared)); });
}

void FailureDetector::expect_all_by(Deadline deadline) {
  impl_->loop->post([impl = impl_, deadline] {
    if (impl->stopped) return;
    impl->init_deadline = deadline;
    for (int r = 1; r < impl->size(); ++r) {
      if (impl->links.count(r) == 0 && impl->gone.count(r) == 0) impl->awaited[r] = Silence();
    }
    impl->schedule_check(kCheckPeriodDuringInit);
  });
}

void FailureDetector::report_abort(const DetectorMessage& abort) {
  impl_->loop->post([impl = impl_, abort] { impl->report_abort(abort); });
}

void FailureDetector::announce(const DetectorMessage& message) {
  impl_->loop->post([impl = impl_, message] {
    if (impl->stopped || impl->excluded) return;
    if (!impl->is_leader()) return impl->send(impl->leader, message);
    message.kind == Kind::compare ? impl->compare_calls(message) : impl->spread_departure(message);
  });
}

void FailureDetector::send_to_leader(const DetectorMessage& message) {
  if (impl_->is_leader()) return impl_->events.waiting(message);
  impl_->send(impl_->leader, message);
}

void FailureDetector::send(int rank, const DetectorMessage& message) { impl_->send(rank, message); }

}  // namespace maniple
