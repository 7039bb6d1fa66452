#include "session/failure_detector.h"

#include <map>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>
#include "base/check.h"
#include "base/log.h"
#include "net/address.h"
#include "session/detector_link.h"
#include "session/inquiry.h"
#include "session/probe.h"
#include "session/reach.h"

namespace maniple {
namespace {

using Kind = DetectorMessage::Kind;
using Clock = Deadline::Clock;

constexpr std::chrono::milliseconds kTellOfLeavers{50};  // one frame each to all, for all that leave in this time
constexpr std::chrono::milliseconds kFirstLook{100};     // after ranks that have not come to a new hub
constexpr std::chrono::milliseconds kLook{250};
constexpr std::chrono::milliseconds kLookWhileJoining{1000};

DetectorMessage about(Kind kind, int rank, std::string text = {}) {
  DetectorMessage message;
  message.kind = kind;
  message.rank = rank;
  message.text = std::move(text);
  return message;
}

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

struct FailureDetector::Impl : std::enable_shared_from_this<FailureDetector::Impl> {
  std::shared_ptr<EventLoop> loop;
  int rank = 0;
  std::vector<PeerInfo> peers;
  double heartbeat_s = 0;
  Events events;

  int hub_rank = 0;  // the lowest that is not gone
  std::map<int, std::shared_ptr<DetectorLink>> links;
  std::map<int, DetectorMessage> gone;              // lost, left or gone, as it is told to others
  std::map<int, Clock::time_point> awaited;        // on the hub: those that have not dialled in, and since when
  std::optional<Deadline> joining;                 // until then ranks may come for the first time
  std::vector<int> leavers;                        // on the hub: the others are still to be told
  std::map<std::string, DetectorMessage> reported;  // aborts by group that no hub has passed on yet
  std::vector<DetectorMessage> early;               // aborts that others reported here before this rank was the hub
  std::set<std::string> failed;                    // groups, on the hub
  std::shared_ptr<Inquiries> inquiries;
  std::unique_ptr<Probes> probes;
  std::unique_ptr<Reach> reach;
  Clock::time_point last_tick = Clock::now();
  Clock::time_point last_look = Clock::now();
  bool looking = false;
  bool given_up = false;  // by the others: this rank is no longer one of them
  bool stopped = false;

  bool hub() const { return rank == hub_rank; }
  int size() const { return static_cast<int>(peers.size()); }
  const PeerInfo& info(int r) const { return peers[static_cast<std::size_t>(r)]; }
  std::string name(int r) const { return info(r).describe(r); }
  bool same_host(int r) const { return info(r).host_key == info(rank).host_key; }

  template <class Callback>
  void call_later(Clock::duration delay, Callback callback) {
    loop->call_at(Deadline::after(delay), [weak = weak_from_this(), callback] {
      const auto self = weak.lock();
      if (self && !self->stopped && !self->given_up) callback(*self);
    });
  }

  // ---- Connections ---------------------------------------------------------------------------------------------

  void adopt(int peer, SecureConnection connection) {
    if (stopped || given_up) return;
    if (const auto it = gone.find(peer); it != gone.end()) {
      DetectorLink(loop, std::move(connection)).send(about(Kind::lost, peer, it->second.text));
      return;
    }
    link(peer, std::move(connection));
  }

  void link(int peer, SecureConnection connection) {
    set_liveness(connection.get(), heartbeat_s);
    auto link = std::make_shared<DetectorLink>(loop, std::move(connection));
    links[peer] = link;
    awaited.erase(peer);
    const std::weak_ptr<Impl> weak = weak_from_this();
    link->open({.message =
                    [weak, peer](const DetectorMessage& message) {
                      const auto self = weak.lock();
                      if (self && !self->stopped && !self->given_up) self->on_message(peer, message);
                    },
                .closed =
                    [weak, peer](const std::string& why) {
                      const auto self = weak.lock();
                      if (self && !self->stopped && !self->given_up) self->on_closed(peer, why);
                    }});
    link->send(about(Kind::heartbeat, rank));
    if (hub()) tell_of_gone(*link);
  }

  void on_closed(int peer, const std::string& why) {
    // A rank that leaves while it is dialling a new hub may break that off when it has been let in already. (At joining,
    // when rank 0 is the hub, nobody leaves in good order.)
    const auto it = links.find(peer);
    const bool changing = rank != 0 && peer != 0;
    if (changing && it != links.end() && !it->second->has_spoken()) return vanish(peer);
    lose(peer, why);
  }

  // A rank may know less than its new hub.
  void tell_of_gone(DetectorLink& link) {
    for (const auto& [r, message] : gone) link.send(message);
  }

  std::shared_ptr<DetectorLink> take(int peer) {
    awaited.erase(peer);
    const auto it = links.find(peer);
    if (it == links.end()) return nullptr;
    auto link = std::move(it->second);
    links.erase(it);
    return link;
  }

  void send(int peer, const DetectorMessage& message) {
    if (const auto it = links.find(peer); it != links.end()) it->second->send(message);
  }
  void send_all(const DetectorMessage& message) {
    for (const auto& [peer, link] : links) link->send(message);
  }

  void on_message(int peer, const DetectorMessage& message) {
    const bool from_hub = peer == hub_rank;
    const auto require_rank = [&] {
      if (message.rank < 0 || message.rank >= size())
        throw ProtocolError(fmt::format("a control message about rank {}", message.rank));
    };
    switch (message.kind) {
      case Kind::heartbeat: return;
      case Kind::bye: return leave(peer);
      case Kind::lost:
        require_rank();
        if (message.rank == rank)
          return from_hub ? give_up(message.text) : lose(peer, "it has given up this rank: " + message.text);
        if (from_hub) lose_as_told(message.rank, message.text);
        return;
      case Kind::left:
        require_rank();
        if (from_hub && message.rank != rank) leave(message.rank);
        return;
      case Kind::gone:
        require_rank();
        if (from_hub && message.rank != rank) vanish(message.rank);
        return;
      case Kind::abort:
        if (from_hub) {
          reported.erase(message.group);
          return events.aborted(message);
        }
        early.push_back(message);
        early.back().origin = peer;
        if (hub()) spread_early();
        return;
      case Kind::question: {
        DetectorMessage answer = message;
        answer.kind = Kind::answer;
        answer.rank = rank;
        answer.text = events.called(message.group, message.seq);
        return send(peer, answer);
      }
      case Kind::answer:
        if (hub()) inquiries->answered(message);
        return;
      case Kind::waiting: return hub() ? events.waiting(message) : void();
      case Kind::progress: return send(peer, events.position(message));
      case Kind::position: return events.positioned(message);
    }
  }

  // ---- Who is there --------------------------------------------------------------------------------------------

  void lose(int peer, const std::string& why) { lose_as_told(peer, fmt::format("{} is lost: {}", name(peer), why)); }

  void lose_as_told(int peer, const std::string& text) {
    const DetectorMessage message = about(Kind::lost, peer, text);
    if (!gone.emplace(peer, message).second) return;
    if (const auto link = take(peer)) link->send(message);  // if it lives after all, it learns what the others think
    if (hub()) send_all(message);
    events.lost(peer, text);
    elect();
  }

  // In good order.
  void leave(int peer) {
    take(peer);
    if (!gone.emplace(peer, about(Kind::left, peer, name(peer) + " has left")).second) return;
    if (hub()) {
      leavers.push_back(peer);
      if (leavers.size() == 1) call_later(kTellOfLeavers, [](Impl& self) { self.tell_of_leavers(); });
    }
    elect(true);
  }

  void tell_of_leavers() {
    for (const int leaver : leavers) send_all(gone.at(leaver));
    leavers.clear();
  }

  // Left or lost while the hub changed: its words to the old hub, if any, are gone with it.
  void vanish(int peer) {
    take(peer);
    const DetectorMessage message = about(Kind::gone, peer, name(peer) + " is gone");
    if (!gone.emplace(peer, message).second) return;
    if (hub()) send_all(message);
    events.gone(peer);
    elect();
  }

  void give_up(const std::string& text) {
    given_up = true;
    links.clear();
    awaited.clear();
    events.lost(rank, "the other ranks have given up this one: " + text);
  }

  // Why a rank that has been silent for so long counts as lost; nothing if it does not yet.
  std::optional<std::string> silence_of(int peer, double silence) const {
    if (heartbeat_s <= 0 || silence <= heartbeat_s * 0.9) return std::nullopt;
    const char state = same_host(peer) ? process_state(info(peer).pid) : '\0';
    if (state == 'T' || state == 't') return fmt::format("its process is stopped (no heartbeat for {:.1f} s)", silence);
    if (state != '\0' && silence < heartbeat_s * 10) return std::nullopt;
    return fmt::format("no heartbeat for {:.1f} s (stopped, overloaded, or cut off)", silence);
  }

  void tick() {
    const auto now = Clock::now();
    const auto period = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(heartbeat_s / 10));
    // If this thread itself was held up (the machine slept, this process was stopped), others' silence proves nothing.
    const bool held_up = now - last_tick > period * 4;
    last_tick = now;
    std::vector<std::pair<int, std::string>> silent;
    for (const auto& [peer, link] : links) {
      if (held_up) link->set_heard(now);
      if (const auto why = silence_of(peer, seconds(now - link->heard()))) silent.emplace_back(peer, *why);
    }
    for (const auto& [peer, why] : silent) lose(peer, why);
    send_all(about(Kind::heartbeat, rank));
    call_later(period, [](Impl& self) { self.tick(); });
  }

  // ---- The hub -------------------------------------------------------------------------------------------------

  void elect(bool in_good_order = false) {
    if (stopped || given_up) return;
    int next = 0;
    while (gone.count(next) != 0) ++next;  // ends at this rank
    if (next == hub_rank) return;
    hub_rank = next;
    if (hub()) return become_hub();
    // When all leave at the end of a large job, not each of them has to go to each of the others.
    constexpr std::chrono::microseconds kPerRank{100};
    constexpr std::chrono::microseconds kMost{100'000};
    seek(in_good_order ? std::min(kMost, kPerRank * size()) : std::chrono::microseconds(0));
  }

  void become_hub() {
    log_debug("rank {} keeps the watch now", rank);
    const auto now = Clock::now();
    for (int r = 0; r < size(); ++r) {
      if (r != rank && gone.count(r) == 0 && links.count(r) == 0) awaited[r] = now;
    }
    look_later(kFirstLook);
    for (const auto& [peer, link] : links) tell_of_gone(*link);
    for (auto& [group, message] : reported) {
      early.push_back(message);
      early.back().origin = rank;
    }
    reported.clear();
    spread_early();
  }

  void look_later(Clock::duration delay) {
    if (std::exchange(looking, true)) return;
    last_look = Clock::now();
    call_later(delay, [](Impl& self) { self.look_after_awaited(); });
  }

  // Those that have not come to this hub: are they still there?
  void look_after_awaited() {
    looking = false;
    const auto now = Clock::now();
    const bool held_up = now - last_look > kLookWhileJoining * 4;
    const auto missing = awaited;
    for (const auto& [peer, since] : missing) {
      if (held_up) awaited[peer] = now;
      if (held_up || gone.count(peer) != 0) continue;
      const auto silence = silence_of(peer, seconds(now - since));
      if (joining ? joining->expired() : silence.has_value()) {
        lose(peer, joining ? "it never connected after joining" : *silence);
        continue;
      }
      probes->start(peer, Address::parse(same_host(peer) ? info(peer).unix_address : info(peer).tcp_address),
                    [this, sought = peer] {
                      if (stopped || awaited.count(sought) == 0) return;
                      if (joining) return lose(sought, "its process ended after joining, before it connected");
                      vanish(sought);
                    });
    }
    if (awaited.empty()) {
      joining.reset();
    } else {
      look_later(joining ? kLookWhileJoining : kLook);
    }
  }

  // Dials the hub.
  void seek(std::chrono::microseconds delay) {
    const int target = hub_rank;
    const auto self = shared_from_this();  // the thread ends before this object: Reach waits for it
    Reach::Task task;
    task.delay = delay;
    const std::chrono::duration<double> one_try(heartbeat_s > 0 ? heartbeat_s * 0.9 : 20);
    task.one_try = std::chrono::duration_cast<Clock::duration>(one_try);
    task.dial = [this, target](Deadline deadline, int cancel) { return events.dial(target, deadline, cancel); };
    task.hopeless = [this, target](double tried_s) { return silence_of(target, tried_s).has_value(); };
    task.done = [self, target](Reach::Result result) {
      auto shared = std::make_shared<Reach::Result>(std::move(result));
      self->loop->post([self, target, shared] { self->reached(target, *shared); });
    };
    reach = std::make_unique<Reach>(std::move(task));
  }

  void reached(int target, Reach::Result& result) {
    if (stopped) {
      if (result.connection) DetectorLink(loop, std::move(result.connection)).send(about(Kind::bye, rank));
      return;
    }
    if (given_up || target != hub_rank) return;
    if (result.connection) {
      link(target, std::move(result.connection));
      for (const auto& [group, message] : reported) send(target, message);
    } else if (result.refused) {
      vanish(target);
    } else {
      lose(target, "it cannot be reached: " + result.why);
    }
  }

  // ---- Aborts --------------------------------------------------------------------------------------------------

  void spread(const DetectorMessage& message) {
    if (stopped || given_up) return;
    if (!hub()) {
      reported[message.group] = message;
      return send(hub_rank, message);
    }
    if (inquiries->is_open(message.group) || !failed.insert(message.group).second) return;  // the first report counts
    if (message.error != ErrorKind::mismatch || message.seq == 0) return deliver(message);
    std::vector<int> others;
    for (const auto& [peer, link] : links) others.push_back(peer);
    inquiries->begin(message, others);
  }

  void spread_early() {
    for (const DetectorMessage& message : std::exchange(early, {})) spread(message);
  }

  void deliver(const DetectorMessage& message) {
    if (stopped) return;
    events.aborted(message);
    // The rank that reported it hears last: when its call ends, the others know.
    for (const auto& [peer, link] : links) {
      if (peer != message.origin) link->send(message);
    }
    send(message.origin, message);
  }

  void start() {
    inquiries = std::make_shared<Inquiries>(Inquiries::Means{
        .loop = loop,
        .rank = rank,
        .called = [this](const std::string& group, std::uint64_t seq) { return events.called(group, seq); },
        .send = [this](int peer, const DetectorMessage& message) { send(peer, message); },
        .concluded = [this](const DetectorMessage& message) { deliver(message); }});
    probes = std::make_unique<Probes>(loop);
    if (heartbeat_s > 0) loop->post([self = shared_from_this()] { self->stopped ? void() : self->tick(); });
  }

  void stop() {
    stopped = true;
    inquiries->stop();
    probes->stop();
    tell_of_leavers();
    send_all(about(Kind::bye, rank));
    links.clear();
  }
};

FailureDetector::FailureDetector(std::shared_ptr<EventLoop> loop, int rank, std::vector<PeerInfo> peers, double heartbeat_s, Events events)
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
  impl_->reach.reset();
  impl_->loop->post_and_wait([] {});  // what it found out has been taken note of
}

void FailureDetector::adopt(int rank, SecureConnection connection) {
  auto shared = std::make_shared<SecureConnection>(std::move(connection));
  impl_->loop->post_and_wait([impl = impl_, rank, shared] { impl->adopt(rank, std::move(*shared)); });
}

void FailureDetector::expect_all_by(Deadline deadline) {
  impl_->loop->post([impl = impl_, deadline] {
    if (impl->stopped) return;
    impl->joining = deadline;
    for (int r = 1; r < impl->size(); ++r) {
      if (impl->links.count(r) == 0 && impl->gone.count(r) == 0) impl->awaited[r] = Clock::now();
    }
    impl->look_later(kLookWhileJoining);
  });
}

void FailureDetector::spread(const DetectorMessage& abort) {
  impl_->loop->post([impl = impl_, abort] { impl->spread(abort); });
}

void FailureDetector::tell_hub(const DetectorMessage& message) {
  if (impl_->hub()) return impl_->events.waiting(message);
  impl_->send(impl_->hub_rank, message);
}

void FailureDetector::send(int rank, const DetectorMessage& message) { impl_->send(rank, message); }

}  // namespace maniple
