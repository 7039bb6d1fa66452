#include "comm/transport/exchange.h"

#include <poll.h>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/interrupt.h"
#include "comm/base/system_error.h"
#include "comm/net/address.h"
#include "comm/shm/waiter.h"
#include "comm/transport/mesh.h"

namespace maniple {
namespace {

using namespace std::chrono_literals;
using Clock = Deadline::Clock;

// With more senders and receivers than this, one poll() is cheaper than trying each.
constexpr std::size_t kTryEach = 6;
// Another waiter may consume the hint that a connection has arrived, so it is trusted for this long only.
constexpr auto kConnectionPoll = 5ms;
// Rings have no descriptor: while sockets are pending as well, rings are polled at this interval.
constexpr auto kMixedPoll = 200us;
// Upper bound on noticing an abort while only rings are awaited.
constexpr auto kLocalPoll = 5ms;
// A host that stays silent for this many heartbeats is lost: see set_liveness.
constexpr double kSilentHeartbeats = 4;
constexpr double kChecksPerHeartbeat = 2;

timespec to_timespec(Deadline::Duration duration) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

}  // namespace

struct Exchange::Impl {
  Impl(Mesh& group_mesh, std::span<const int> member_ranks, const Signature& call, Deadline until)
      : mesh(group_mesh),
        members(member_ranks.begin(), member_ranks.end()),
        signature(call),
        deadline(until),
        began(Clock::now()),
        check_interval(mesh.channel_options_.heartbeat_s / kChecksPerHeartbeat) {
    MANIPLE_ASSERT(!mesh.busy_);
    if (!mesh.broken_.empty()) throw Aborted("an earlier operation was interrupted: " + mesh.broken_);
    const auto own = std::find(members.begin(), members.end(), mesh.options_.rank);
    MANIPLE_ASSERT(own != members.end());
    rank = static_cast<int>(own - members.begin());
    if (check_interval.count() > 0) next_check = began + std::chrono::duration_cast<Clock::duration>(check_interval);
    mesh.busy_ = true;
  }

  ~Impl() {
    if (mesh.broken_.empty() && (!senders.empty() || !receivers.empty())) {
      mesh.broken_ = signature.describe() + " ended before its messages were complete";
    }
    if (!mesh.broken_.empty()) {
      for (const auto& sender : mesh.senders_) {
        if (sender) sender->abandon();
      }
      for (const auto& receiver : mesh.receivers_) {
        if (receiver) receiver->abandon();
      }
    }
    mesh.transfers_.clear();
    mesh.busy_ = false;
  }

  /// Runs `body`. Any failure leaves connections in the middle of frames, so the mesh is unusable afterwards.
  template <class Body>
  auto guarded(Body body) {
    try {
      return body();
    } catch (const Mismatch& error) {
      if (mesh.broken_.empty()) mesh.broken_ = error.what();
      ErrorInfo info = error.info();
      info.calls.push_back({.rank = global_rank(mesh.options_.rank), .call = signature.describe()});
      throw Mismatch(std::move(info));
    } catch (const std::exception& error) {
      if (mesh.broken_.empty()) mesh.broken_ = error.what();
      throw;
    }
  }

  Transfer& add_transfer(std::size_t size) {
    Transfer& transfer = mesh.transfers_.emplace_back();
    transfer.signature = &signature;
    transfer.size = size;
    return transfer;
  }

  bool advance() {
    const bool moved = senders.size() + receivers.size() <= kTryEach ? advance_each() : advance_ready();
    drop_idle();
    return moved;
  }

  bool advance_each() {
    bool moved = false;
    for (FrameReceiver* receiver : receivers) moved |= receiver->advance();
    for (FrameSender* sender : senders) moved |= sender->advance();
    return moved;
  }

  bool advance_ready() {
    bool moved = false;
    descriptors.clear();
    marks.clear();
    for (std::size_t i = 0; i < receivers.size() + senders.size(); ++i) {
      const bool receives = i < receivers.size();
      const std::size_t before = descriptors.size();
      if (receives) {
        receivers[i]->add_descriptors(descriptors);
      } else {
        senders[i - receivers.size()]->add_descriptors(descriptors);
      }
      const bool by_descriptor = descriptors.size() > before && descriptors.back().fd >= 0 &&
                                 !(receives && (receivers[i]->awaits_connection() || receivers[i]->has_read_ahead()));
      if (!by_descriptor) {
        descriptors.resize(before);
        moved |= receives ? receivers[i]->advance() : senders[i - receivers.size()]->advance();
      }
      marks.resize(descriptors.size(), i);
    }
    if (descriptors.empty() || ::poll(descriptors.data(), descriptors.size(), 0) <= 0) return moved;
    for (std::size_t d = 0; d < descriptors.size(); ++d) {
      const bool advanced = d > 0 && marks[d] == marks[d - 1] && descriptors[d - 1].revents != 0;
      if (descriptors[d].revents == 0 || advanced) continue;
      const std::size_t i = marks[d];
      moved |= i < receivers.size() ? receivers[i]->advance() : senders[i - receivers.size()]->advance();
    }
    return moved;
  }

  void drop_idle() {
    std::erase_if(receivers, [](const FrameReceiver* receiver) { return !receiver->pending(); });
    std::erase_if(senders, [](const FrameSender* sender) { return !sender->pending(); });
  }

  template <class Done>
  void wait_until(Done done) {
    std::optional<Waiter::Wait> idle;  // set while nothing moves
    for (;;) {
      const bool aborted = mesh.options_.abort->raised();
      const bool moved = advance();
      if (done()) return;  // data that has arrived counts, even after an abort or time-out
      if (aborted) mesh.options_.abort->rethrow();
      const auto now = Clock::now();
      if (now >= deadline.when()) throw Timeout(timeout(now));
      if (now >= next_check) check_silent_hosts(now);
      if (moved) {
        idle.reset();
      } else if (!idle) {
        idle.emplace(mesh.waiter_);
      } else if (idle->resume(); !idle->may_spin()) {  // spinning means trying to send and receive
        wait_for_events(*idle);
      }
    }
  }

  /// Sleeps until an awaited event may have happened.
  void wait_for_events(Waiter::Wait& wait) {
    bool awaits_connection = false;
    bool awaits_ring = false;
    descriptors.clear();
    descriptors.push_back({mesh.options_.abort->fd(), POLLIN, 0});
    for (const FrameSender* sender : senders) {
      awaits_ring |= sender->local();
      sender->add_descriptors(descriptors);
    }
    for (FrameReceiver* receiver : receivers) {
      awaits_ring |= receiver->local();
      awaits_connection |= receiver->awaits_connection();
      receiver->add_descriptors(descriptors);
    }
    std::erase_if(descriptors, [](const pollfd& entry) { return entry.fd < 0; });
    if (awaits_ring && !awaits_connection && descriptors.size() == 1 && mesh.options_.local_wait) {
      mesh.options_.local_wait(Deadline::sooner(deadline, Deadline::after(kLocalPoll)));
      return;
    }
    if (awaits_connection) descriptors.push_back({mesh.options_.connector->arrival_fd(), POLLIN, 0});
    if (!awaits_ring && is_ready_before_sleep(wait)) return;
    // The next check for silent hosts may be due by now.
    auto limit = std::clamp<Deadline::Duration>(next_check - Clock::now(), {}, deadline.remaining());
    if (awaits_connection) limit = std::min<Deadline::Duration>(limit, kConnectionPoll);
    if (awaits_ring) limit = std::min<Deadline::Duration>(limit, kMixedPoll);
    if (Interrupt::is_set()) {
      Interrupt::check();
      limit = std::min<Deadline::Duration>(limit, Interrupt::kLook);
    }
    const timespec time = to_timespec(limit);
    const bool forever = limit == Deadline::Duration::max();
    if (::ppoll(descriptors.data(), descriptors.size(), forever ? nullptr : &time, nullptr) < 0 && errno != EINTR) {
      throw_system_error("ppoll");
    }
  }

  /// The yield stage of a wait: polls the descriptors without sleeping.
  bool is_ready_before_sleep(Waiter::Wait& wait) {
    for (const auto end = std::min(deadline.when(), next_check); wait.may_yield() && Clock::now() < end;) {
      if (::poll(descriptors.data(), descriptors.size(), 0) != 0) return true;
      wait.read_clock();
    }
    return false;
  }

  /// The kernel's keep-alive probes detect a silent host, but not while sent bytes are unacknowledged. For such
  /// connections this queries how long ago the host was last heard.
  void check_silent_hosts(Clock::time_point now) {
    // If checks are far apart, an acknowledgement may have arrived and more been sent in between.
    if (now - next_check > check_interval) unanswered.clear();
    next_check = now + std::chrono::duration_cast<Clock::duration>(check_interval);
    std::vector<Unanswered> found;
    const auto check = [&](const auto& transfers) {
      for (const auto* each : transfers) {
        descriptors.clear();
        each->add_descriptors(descriptors);
        for (const pollfd& entry : descriptors) {
          const auto heard = entry.fd < 0 ? std::nullopt : unanswered_for(entry.fd);
          if (!heard) continue;
          const auto before = std::find_if(unanswered.begin(), unanswered.end(),
                                           [&](const Unanswered& one) { return one.fd == entry.fd; });
          found.push_back({entry.fd, before == unanswered.end() ? now : std::max(before->since, now - *heard)});
          const std::chrono::duration<double> silent = now - found.back().since;
          if (silent < check_interval * (kChecksPerHeartbeat * kSilentHeartbeats)) continue;
          throw each->peer().lost(
              each->progress(),
              SystemError(fmt::format("its host has not answered for {:.1f} s", silent.count()), ETIMEDOUT),
              each->bytes());
        }
      }
    };
    check(receivers);
    check(senders);
    unanswered = std::move(found);
  }

  ErrorInfo timeout(Clock::time_point now) const {
    ErrorInfo info;
    info.waited_s = std::chrono::duration<double>(now - began).count();
    info.reason = fmt::format("timed out after {:.1f} s", info.waited_s);
    const auto add = [&info](const char* before, const auto& pending) {
      for (const auto* each : pending) {
        info.reason += fmt::format("{}{} ({})", before, each->peer().name(), each->progress());
        before = ", ";
        info.bytes_moved += each->bytes().moved;
        info.bytes_expected += each->bytes().expected;
        const int peer = each->peer().global_rank;
        if (std::count(info.ranks.begin(), info.ranks.end(), peer) == 0) info.ranks.push_back(peer);
      }
    };
    add("; waiting for ", receivers);
    add("; not receiving what this rank sends: ", senders);
    return info;
  }

  int global_rank(int of) const { return mesh.options_.global_ranks[of]; }

  Mesh& mesh;
  std::vector<int> members;
  Signature signature;
  Deadline deadline;
  Clock::time_point began;
  int rank = 0;
  std::vector<FrameSender*> senders;  // senders with frames to move
  std::vector<FrameReceiver*> receivers;
  std::vector<pollfd> descriptors;
  std::vector<std::size_t> marks;  // index of each descriptor's receiver or sender

  struct Unanswered {
    int fd;
    Clock::time_point since;  // the first check that found it so, or the host's last sign of life after that
  };
  std::chrono::duration<double> check_interval;  // 0: not checked
  Clock::time_point next_check = Clock::time_point::max();
  std::vector<Unanswered> unanswered;
};

Exchange::Exchange(Mesh& mesh, std::span<const int> members, const Signature& signature, Deadline deadline)
    : impl_(std::make_unique<Impl>(mesh, members, signature, deadline)) {}
Exchange::~Exchange() = default;

int Exchange::rank() const noexcept { return impl_->rank; }
int Exchange::size() const noexcept { return static_cast<int>(impl_->members.size()); }

Exchange::Ticket Exchange::send(int peer, std::span<const std::byte> bytes) {
  return impl_->guarded([&] {
    impl_->mesh.options_.abort->check();
    FrameSender& sender = impl_->mesh.sender(impl_->members[peer]);
    Transfer& transfer = impl_->add_transfer(bytes.size());
    transfer.from = bytes.data();
    const bool was_idle = !sender.pending();
    sender.post(transfer, impl_->deadline);
    // Sends the header at once, so that the peer learns this rank's call even if this rank fails.
    if (was_idle) sender.advance();
    if (was_idle && sender.pending()) impl_->senders.push_back(&sender);
    return static_cast<Ticket>(impl_->mesh.transfers_.size() - 1);
  });
}

Exchange::Ticket Exchange::recv(int peer, std::span<std::byte> bytes) {
  FrameReceiver& receiver = impl_->mesh.receiver(impl_->members[peer]);
  Transfer& transfer = impl_->add_transfer(bytes.size());
  transfer.to = bytes.data();
  if (!receiver.pending()) impl_->receivers.push_back(&receiver);
  receiver.post(transfer);
  return static_cast<Ticket>(impl_->mesh.transfers_.size() - 1);
}

void Exchange::wait(Ticket ticket) {
  const Transfer& transfer = impl_->mesh.transfers_[ticket];
  if (transfer.done) return;
  impl_->guarded([&] { impl_->wait_until([&] { return transfer.done; }); });
}

void Exchange::wait_all() {
  if (impl_->senders.empty() && impl_->receivers.empty()) return;
  impl_->guarded([&] { impl_->wait_until([this] { return impl_->senders.empty() && impl_->receivers.empty(); }); });
}

void Exchange::progress() {
  impl_->guarded([this] {
    impl_->mesh.options_.abort->check();
    impl_->advance();
  });
}

std::span<std::byte> Exchange::scratch(std::size_t bytes) { return impl_->mesh.scratch(bytes); }

}  // namespace maniple
