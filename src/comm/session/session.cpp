#include "comm/session/session.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/error_codec.h"
#include "comm/base/fork_guard.h"
#include "comm/base/host.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"

namespace maniple {
namespace {

constexpr double kLeastDialTime = 30;
// Time for rank 0 to get the control connections of all ranks: a thousand ranks may share a few cores.
constexpr std::chrono::milliseconds kConnectTime{20'000};
constexpr std::chrono::milliseconds kConnectTimeOfOne{100};

std::uint64_t random_word() {
  std::uint64_t word = 0;
  if (::getrandom(&word, sizeof word, 0) != static_cast<ssize_t>(sizeof word)) throw_system_error("getrandom");
  return word;
}

/// Identifies a process; children of fork() get a new value.
struct ProcessWord {
  std::uint64_t value = random_word();
};
constinit ProcessWide<ProcessWord> process_word;

}  // namespace

std::shared_ptr<Session> Session::start(RendezvousResult result, TransportKind transport, const ChosenSettings& chosen,
                                        Deadline deadline) {
  std::shared_ptr<Session> session(new Session(std::move(result), transport));
  session->listen();
  session->exchange_addresses(chosen, deadline);
  session->start_failure_detector(deadline);
  session->start_wait_reports();
  session->start_call_watch();
  return session;
}

Session::Session(RendezvousResult result, TransportKind transport)
    : rendezvous_(std::move(result)),
      transport_(transport),
      encrypts_(knob_flag(Knob::encrypt)),
      loop_(EventLoop::shared()),
      arrivals_(new_event()) {
  MANIPLE_REQUIRE(
      !encrypts_ || !rendezvous_.identity.secret.is_none(),
      "MANIPLE_ENCRYPT is 1, but the job has no secret, so anyone could decrypt: set MANIPLE_SECRET_FILE on every "
      "host (mode 0600, 64 hexadecimal digits)");
}

Session::~Session() {
  // Acceptors first: nothing new may arrive during the teardown.
  tcp_.reset();
  unix_.reset();
  // The acceptors' posted callbacks have run after this. Not checked by the analysis: nothing sets waits_ any more.
  loop_->post_and_wait([this]() MANIPLE_NO_THREAD_SAFETY_ANALYSIS {
    if (waits_) waits_->stop();
    if (watch_) watch_->stop();
  });
  detector_.reset();
  segments_.reset();
}

void Session::listen() {
  const Acceptor::Owner owner{
      .refusal = [this](const Hello& hello, const Address& peer) { return refusal(hello, peer); },
      .accept = [this](SecureConnection connection, const Hello& hello,
                       const Address&) { accept(std::move(connection), hello); }};
  tcp_ = std::make_unique<Acceptor>(loop_, listen_on(rendezvous_.data_address), rendezvous_.identity, owner);
  const std::string name = fmt::format("maniple-{:016x}{:016x}", random_word(), random_word());
  unix_ = std::make_unique<Acceptor>(loop_, listen_on(Address::unix_abstract(name)), rendezvous_.identity, owner);
}

void Session::exchange_addresses(const ChosenSettings& chosen, Deadline deadline) {
  const HostIdentity host = host_identity();
  PeerInfo mine;
  mine.host_key = host.key;
  mine.host_name = host.name;
  mine.pid = ::getpid();
  mine.process = process_word->value;
  mine.unix_address = unix_->address().to_string();
  mine.tcp_address = tcp_->address().to_string();
  mine.cores = CoreSet::of_this_process();
  MetPeers met =
      exchange_peers(rendezvous_.store, rank(), world_size(), {mine, settings_of_this_rank(chosen)}, deadline);
  rendezvous_.store = std::move(met.store);
  if (const auto done = std::exchange(rendezvous_.met, nullptr)) done();
  const MutexLock lock(mutex_);
  table_ = std::move(met.table);
  segments_ = std::make_unique<SegmentBroker>(table_.world_id);
  for (auto& [topic, connection] : early_segments_) segments_->serve(topic, std::move(connection));
  early_segments_.clear();
}

void Session::start_failure_detector(Deadline deadline) {
  bool all_here = transport_ != TransportKind::tcp;
  for (int r = 0; r < world_size(); ++r) all_here &= same_process(r);
  if (all_here) return;  // threads of one process end together, so no detector is needed
  FailureDetector::Events events;
  events.lost = [this](int lost, const std::string& text) { on_lost(lost, text); };
  events.gone = [this](int gone) { on_gone(gone); };
  events.dial = [this](int leader, Deadline limit, int cancel) { return dial_control(leader, limit, cancel); };
  events.aborted = [this](const detector::Abort& message) { on_aborted(message); };
  events.departed = [this](const detector::Departed& message) { on_departed(message); };
  events.survivors = [this](const detector::Survivors& decision) { on_survivors(decision); };
  events.missing = [this](const detector::Missing& missing) { on_missing(missing); };
  events.called = [this](const std::string& group, std::uint64_t seq) { return call_of(group, seq); };
  // The callbacks may read waits_ from here on, before it is set.
  const auto waits = [this] {
    const MutexLock lock(mutex_);
    return waits_;
  };
  events.waiting = [waits](const detector::Waiting& message) {
    if (const auto reports = waits()) reports->on_waiting(message);
  };
  events.progress = [waits](const detector::QueryProgress& query) -> std::optional<detector::ProgressReply> {
    const auto reports = waits();
    if (!reports) return std::nullopt;
    return reports->progress(query);
  };
  events.progress_reply = [waits](const detector::ProgressReply& answer) {
    if (const auto reports = waits()) reports->on_progress_reply(answer);
  };
  const double heartbeat = knob_number(Knob::heartbeat_s);
  auto detector = std::make_unique<FailureDetector>(loop_, rank(), table_.peers, heartbeat, std::move(events));
  SecureConnection connection;
  if (rank() != 0) connection = dial_control(0, deadline);
  std::map<int, SecureConnection> early;
  {
    const MutexLock lock(mutex_);
    detector_ = std::move(detector);
    early = std::move(early_control_);
  }
  if (connection) detector_->adopt(0, std::move(connection));
  for (auto& [peer, early_connection] : early) detector_->adopt(peer, std::move(early_connection));
  if (rank() == 0) detector_->expect_all_by(Deadline::after(kConnectTime + world_size() * kConnectTimeOfOne));
}

void Session::start_wait_reports() {
  const double after_s = knob_number(Knob::wait_report_s);
  if (after_s <= 0 || world_size() < 2) return;
  WaitReports::Callbacks callbacks;
  callbacks.loop = loop_;
  callbacks.rank = rank();
  callbacks.world = world_id();
  callbacks.after_s = after_s;
  callbacks.groups = [this] { return group_progress(true); };
  callbacks.describe = [this](int r) { return peer(r).describe(r); };
  if (detector_) {
    callbacks.send_to_leader = [this](const detector::Waiting& message) { detector_->send_to_leader(message); };
    callbacks.ask = [this](int r, const detector::QueryProgress& message) { detector_->send(r, message); };
  }
  auto reports = WaitReports::start(std::move(callbacks));
  const MutexLock lock(mutex_);
  waits_ = std::move(reports);
}

std::vector<WaitReports::Group> Session::group_progress(bool messages) {
  std::vector<WaitReports::Group> groups;
  const MutexLock lock(mutex_);
  for (const auto& [name, group] : groups_) {
    groups.push_back({name, group.members, group.progress, messages && group.message ? group.message() : MessageWait{},
                      group.compares_arguments});
  }
  return groups;
}

void Session::start_call_watch() {
  if (!knob_flag(Knob::checks) || world_size() < 2) return;
  CallWatch::Callbacks callbacks;
  callbacks.loop = loop_;
  callbacks.rank = rank();
  callbacks.world = world_id();
  callbacks.groups = [this] { return group_progress(false); };
  callbacks.called = [this](const std::string& group, std::uint64_t seq) { return call_of(group, seq); };
  callbacks.aborted = [this](const detector::Abort& abort) { on_aborted(abort); };
  if (detector_) {
    callbacks.compare = [this](const std::string& group, std::uint64_t seq) { compare_calls(group, seq); };
  }
  watch_ = CallWatch::start(std::move(callbacks));
}

SecureConnection Session::dial_control(int leader, Deadline deadline, int cancel) const {
  const Address address = Address::parse(same_host(leader) ? peer(leader).unix_address : peer(leader).tcp_address);
  Hello hello;
  hello.role = Role::control;
  hello.rank = rank();
  hello.to = leader;
  return maniple::dial(address, rendezvous_.identity, hello, deadline, false, cancel);
}

// In the event loop's thread.
std::string Session::refusal(const Hello& hello, const Address& peer) const {
  if (hello.rank < 0 || hello.rank >= world_size())
    return fmt::format("rank {} in a world of {}", hello.rank, world_size());
  if (hello.role == Role::segment && !peer.is_unix()) return "shared memory is handed over on Unix sockets only";
  if (hello.role == Role::store) return "no store is served here";
  if (hello.role == Role::data && hello.encrypt != encrypts_) {
    return fmt::format("MANIPLE_ENCRYPT is {} on rank {} but {} on rank {}; it must be alike on all ranks",
                       encrypts_ ? 1 : 0, rank(), hello.encrypt ? 1 : 0, hello.rank);
  }
  return {};
}

void Session::accept(SecureConnection connection, const Hello& hello) {
  const MutexLock lock(mutex_);
  switch (hello.role) {
    case Role::data:
      if (past_groups_.contains(group_of(hello.topic))) return;  // no group will take the connection
      waiting_[{hello.rank, hello.topic}].push_back(std::move(connection));
      ::eventfd_write(arrivals_.get(), 1);
      return;
    case Role::segment:
      if (!segments_) {
        early_segments_.emplace_back(hello.topic, std::move(connection.fd));
      } else {
        segments_->serve(hello.topic, std::move(connection.fd));
      }
      return;
    case Role::control:
      if (!detector_) {
        early_control_[hello.rank] = std::move(connection);
      } else {
        // Posted, because adopt may report a rank as lost, which takes the lock.
        auto shared = std::make_shared<SecureConnection>(std::move(connection));
        loop_->post([this, shared, from = hello.rank] { detector_->adopt(from, std::move(*shared)); });
      }
      return;
    case Role::store: return;  // refused
  }
}

SecureConnection Session::dial(int global_rank, const std::string& topic, Deadline deadline, const AbortSignal& abort) {
  abort.check();
  Hello hello;
  hello.role = Role::data;
  hello.rank = rank();
  hello.topic = topic;
  hello.to = global_rank;
  hello.encrypt = encrypts_;
  // Reports a port blocked by a firewall long before the operation's deadline, but not before a silent rank counts as
  // lost.
  const double heartbeat = knob_number(Knob::heartbeat_s);
  const Deadline limit = heartbeat > 0
                             ? Deadline::sooner(deadline, Deadline::after(Seconds(std::max(kLeastDialTime, heartbeat))))
                             : deadline;
  const auto text = [&](const Error& error) {
    return fmt::format("{} cannot be reached at {}: {}", peer(global_rank).describe(global_rank),
                       peer(global_rank).tcp_address, error.what());
  };
  const auto began = Deadline::Clock::now();
  const auto pause = std::chrono::milliseconds(100);
  for (;;) {
    try {
      return maniple::dial(Address::parse(peer(global_rank).tcp_address), rendezvous_.identity, hello, limit, false,
                           abort.fd());
    } catch (const Aborted&) {
      abort.check();
      throw;
    } catch (const Timeout& error) {
      abort.check();
      const std::chrono::duration<double> waited = Deadline::Clock::now() - began;
      if (deadline.expired()) throw Timeout(text(error), {global_rank}, waited.count());
      throw PeerLost(text(error), global_rank, LossKind::failed);
    } catch (const SystemError& error) {
      abort.check();
      const int code = error.code();
      const bool last = limit.remaining() <= pause;
      if (is_local_shortage(code)) {
        if (code != EADDRNOTAVAIL || last) throw;  // local ports become free again
      } else if (!network_may_recover(code) || last) {
        throw PeerLost(text(error), global_rank, code == ECONNREFUSED ? LossKind::left_or_ended : LossKind::failed);
      }
    }
    pollfd wake{abort.fd(), POLLIN, 0};
    ::poll(&wake, 1, static_cast<int>(pause.count()));
  }
}

SecureConnection Session::try_take(int global_rank, const std::string& topic) {
  eventfd_t count = 0;
  ::eventfd_read(arrivals_.get(), &count);
  const MutexLock lock(mutex_);
  const auto it = waiting_.find({global_rank, topic});
  if (it == waiting_.end() || it->second.empty()) return {};
  SecureConnection connection = std::move(it->second.front());
  it->second.pop_front();
  if (it->second.empty()) waiting_.erase(it);
  return connection;
}

void Session::offer(const std::string& topic, const std::vector<int>& members, SharedFile file) {
  int threads = -1;  // not counting this one
  for (const int member : members) threads += same_process(member) ? 1 : 0;
  segments_->offer(topic, std::move(file), static_cast<int>(members.size()) - 1 - threads, threads);
}

template <class Here, class There>
auto Session::take(const std::string& topic, int maker, Deadline deadline, const AbortSignal& abort, Here&& here,
                   There&& there) {
  const auto began = Deadline::Clock::now();
  try {
    if (same_process(maker)) return here(SegmentBroker::take_here(world_id(), topic, deadline));
    Hello hello;
    hello.role = Role::segment;
    hello.rank = rank();
    hello.topic = topic;
    hello.to = maker;
    // Never break off the short handshake: the other side would take this rank for an unauthenticated peer.
    const SecureConnection connection =
        maniple::dial(Address::parse(peer(maker).unix_address), rendezvous_.identity, hello, deadline);
    return there(receive_descriptor(connection.get(), deadline, abort.fd()));
  } catch (const Aborted&) {
    abort.check();
    throw;
  } catch (const SystemError& error) {
    abort.check();
    const int code = error.info().code;
    if (code != ECONNREFUSED && code != ECONNRESET && code != EPIPE) throw;
    throw PeerLost(
        fmt::format("{} has ended before it handed over shared memory: {}", peer(maker).describe(maker), error.what()),
        maker, LossKind::left_or_ended);
  } catch (const Timeout& error) {
    const double waited = std::chrono::duration<double>(Deadline::Clock::now() - began).count();
    throw Timeout(fmt::format("{}: waited {:.1f} s for {}", error.what(), waited, peer(maker).describe(maker)), {maker},
                  waited);
  }
}

std::shared_ptr<Segment> Session::share_segment(const std::string& topic, const std::vector<int>& members,
                                                std::size_t bytes, Deadline deadline, const AbortSignal& abort) {
  if (members.front() == rank()) {
    auto segment = Segment::create(bytes);
    offer(topic, members, {segment, nullptr});
    return segment;
  }
  return take(
      topic, members.front(), deadline, abort, [](const SharedFile& file) { return file.segment; },
      [](ReceivedDescriptor received) { return Segment::adopt(std::move(received.fd), received.about); });
}

UniqueFd Session::share_descriptor(const std::string& topic, const std::vector<int>& members, int descriptor,
                                   Deadline deadline, const AbortSignal& abort) {
  if (members.front() == rank()) {
    offer(topic, members, {nullptr, std::make_shared<UniqueFd>(duplicate(descriptor))});
    return {};
  }
  return take(
      topic, members.front(), deadline, abort, [&](const SharedFile& file) { return duplicate(file.fd()); },
      [](ReceivedDescriptor received) { return std::move(received.fd); });
}

}  // namespace maniple
