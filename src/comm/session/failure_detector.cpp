// Executes what the core decides (detector_core.h), on connections, timers and /proc.
#include "comm/session/failure_detector.h"

#include <map>
#include <utility>

#include "comm/base/log.h"
#include "comm/net/address.h"
#include "comm/session/detector_link.h"
#include "comm/session/peer_dialer.h"

namespace maniple {

struct FailureDetector::Impl : std::enable_shared_from_this<FailureDetector::Impl> {
  using Clock = Deadline::Clock;

  Impl(std::shared_ptr<EventLoop> event_loop, int own_rank, std::vector<PeerInfo> infos, double heartbeat,
       FailureDetector::Events callbacks)
      : loop(std::move(event_loop)),
        rank(own_rank),
        peers(std::move(infos)),
        heartbeat_s(heartbeat),
        events(std::move(callbacks)),
        core(own_rank, members(), heartbeat),
        probes(loop) {}

  const PeerInfo& info(int r) const { return peers[r]; }
  bool same_host(int r) const { return info(r).host_key == info(rank).host_key; }
  std::vector<detector::Core::Member> members() const {
    std::vector<detector::Core::Member> result;
    for (int r = 0; r < static_cast<int>(peers.size()); ++r) result.push_back({info(r).describe(r), same_host(r)});
    return result;
  }

  void handle(detector::Event event);
  void open(int peer, SecureConnection connection);
  void dial(const detector::Dial& task);

  void execute(const detector::Send& effect) { send(effect.to, effect.message); }
  void execute(const detector::Close& effect) {
    if (const auto node = links.extract(effect.peer)) node.mapped()->close();
  }
  void execute(const detector::Dial& task) {
    try {
      dial(task);
    } catch (const std::exception& error) {  // a shortage of descriptors or threads, which may pass
      loop->post([self = shared_from_this(), to = task.to, why = std::string(error.what())] {
        self->handle(detector::DialFailed{.to = to, .refused = false, .why = why});
      });
    }
  }
  void execute(const detector::Probe& probe);
  void execute(const detector::ReadProcessState& read) {
    handle(detector::ProcessState{.peer = read.peer, .state = process_state(info(read.peer).pid)});
  }
  void execute(detector::LookUpCall& look) {
    RankCall call = events.called(look.query.group, look.query.seq);
    handle(detector::CallFound{.asker = look.asker, .query = std::move(look.query), .call = std::move(call)});
  }
  void execute(const detector::ReportLost& report) { events.lost(report.rank, report.text); }
  void execute(const detector::ReportGone& report) { events.gone(report.rank); }
  void execute(const detector::ReportAborted& report) { events.aborted(report.abort); }
  void execute(const detector::ReportDeparted& report) { events.departed(report.departed); }
  void execute(const detector::ReportSurvivors& report) { events.survivors(report.decision); }
  void execute(const detector::ReportMissing& report) { events.missing(report.missing); }
  void execute(const detector::ReportWaiting& report) { events.waiting(report.waiting); }
  void execute(const detector::LookUpProgress& look) {
    if (auto reply = events.progress(look.query)) send(look.asker, *reply);
  }
  void execute(const detector::ReportProgress& report) { events.progress_reply(report.reply); }
  void execute(const detector::WakeAt& wake) {
    loop->call_at(Deadline(wake.when), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->handle(detector::Wake{});
    });
  }
  void send(int peer, const detector::Message& message) {
    if (const auto it = links.find(peer); it != links.end()) it->second->send(message);
  }

  std::shared_ptr<EventLoop> loop;
  int rank;
  std::vector<PeerInfo> peers;
  double heartbeat_s;
  FailureDetector::Events events;
  detector::Core core;
  std::map<int, std::shared_ptr<DetectorLink>> links;
  ListenProbes probes;
  std::unique_ptr<PeerDialer> dialer;
  detector::Effects effects;  // not executed yet
  bool executing = false;
};

// Executing an effect may bring further events. Their effects follow the remaining effects of this event.
void FailureDetector::Impl::handle(detector::Event event) {
  const bool led = core.is_leader();
  core.handle(std::move(event), Clock::now(), effects);
  if (core.is_leader() && !led) log_debug("rank {} leads the failure detector now", rank);
  if (executing) return;
  executing = true;
  for (std::size_t i = 0; i < effects.size(); ++i) {
    detector::Effect effect = std::move(effects[i]);
    try {
      std::visit([this](auto& it) { execute(it); }, effect);
    } catch (const std::exception& error) {  // the other effects count all the same
      log_warning("rank {}: the failure detector: {}", rank, error.what());
    }
  }
  effects.clear();
  executing = false;
}

void FailureDetector::Impl::execute(const detector::Probe& probe) {
  const PeerInfo& peer = info(probe.peer);
  probes.start(probe.peer, Address::parse(same_host(probe.peer) ? peer.unix_address : peer.tcp_address),
               [this, sought = probe.peer] { handle(detector::ProbeRefused{sought}); });
}

void FailureDetector::Impl::open(int peer, SecureConnection connection) {
  set_liveness(connection.get(), heartbeat_s);
  retransmit_steadily(connection.get());
  auto link = std::make_shared<DetectorLink>(loop, std::move(connection));
  links[peer] = link;
  const auto with_self = [weak = weak_from_this()](auto&& event) {
    if (const auto self = weak.lock()) self->handle(std::forward<decltype(event)>(event));
  };
  link->open({.message =
                  [with_self, peer](detector::Message message) {
                    with_self(detector::Received{.from = peer, .message = std::move(message)});
                  },
              .heard = [with_self, peer] { with_self(detector::Heard{peer}); },
              .closed = [with_self, peer](const std::string& why) { with_self(detector::Closed{peer, why}); }});
}

void FailureDetector::Impl::dial(const detector::Dial& task) {
  const auto self = shared_from_this();  // the thread ends before this object does: PeerDialer joins it
  const int to = task.to;
  dialer = std::make_unique<PeerDialer>(PeerDialer::Task{
      .delay = task.delay,
      .limit = task.limit,
      .dial = [this, to](Deadline deadline, int cancel) { return events.dial(to, deadline, cancel); },
      .done =
          [self, to](PeerDialer::Result result) {
            auto shared = std::make_shared<PeerDialer::Result>(std::move(result));
            self->loop->post([self, to, shared] {
              if (!shared->connection)
                return self->handle(detector::DialFailed{.to = to, .refused = shared->refused, .why = shared->why});
              self->open(to, std::move(shared->connection));
              self->handle(detector::Dialed{to});
            });
          }});
}

FailureDetector::FailureDetector(std::shared_ptr<EventLoop> loop, int rank, std::vector<PeerInfo> peers,
                                 double heartbeat_s, Events events)
    : impl_(std::make_shared<Impl>(std::move(loop), rank, std::move(peers), heartbeat_s, std::move(events))) {
  impl_->loop->post([impl = impl_] { impl->handle(detector::Start{}); });
}

FailureDetector::~FailureDetector() {
  impl_->loop->post_and_wait([impl = impl_] {
    impl->probes.stop();
    impl->handle(detector::Leave{});
  });
  impl_->dialer.reset();
  impl_->loop->post_and_wait([] {});  // the dialler's result has been handled
}

void FailureDetector::adopt(int rank, SecureConnection connection) {
  auto shared = std::make_shared<SecureConnection>(std::move(connection));
  impl_->loop->post_and_wait([impl = impl_, rank, shared] {
    impl->open(rank, std::move(*shared));
    impl->handle(detector::Adopted{rank});
  });
}

void FailureDetector::expect_all_by(Deadline deadline) {
  impl_->loop->post([impl = impl_, deadline] { impl->handle(detector::ExpectAll{deadline.when()}); });
}

void FailureDetector::report_abort(const detector::Abort& abort) {
  impl_->loop->post([impl = impl_, abort] { impl->handle(detector::AbortHere{abort}); });
}

void FailureDetector::announce(const detector::Departed& departed) {
  impl_->loop->post([impl = impl_, departed] { impl->handle(detector::Announce{departed}); });
}

void FailureDetector::announce(const detector::Compare& compare) {
  impl_->loop->post([impl = impl_, compare] { impl->handle(detector::Announce{compare}); });
}

void FailureDetector::shrink(const detector::Shrink& request) {
  impl_->loop->post([impl = impl_, request] { impl->handle(detector::ShrinkHere{request}); });
}

void FailureDetector::cancel_shrink(const std::string& group) {
  impl_->loop->post([impl = impl_, group] { impl->handle(detector::CancelShrinkHere{group}); });
}

void FailureDetector::send_to_leader(const detector::Waiting& waiting) { impl_->handle(detector::Announce{waiting}); }

void FailureDetector::send(int rank, const detector::QueryProgress& message) { impl_->send(rank, message); }

}  // namespace maniple
