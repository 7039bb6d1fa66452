#include "transport/exchange.h"

#include <poll.h>
#include <sched.h>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/check.h"
#include "base/system_error.h"
#include "transport/mesh_state.h"

namespace maniple {
namespace {

using namespace std::chrono_literals;
using Clock = Deadline::Clock;

// Looking again costs less than sleeping and being woken while a peer answers at once; the processor is offered to
// others between looks, so ranks that share a core do not stand in each other's way.
constexpr auto kSpin = 20us;
// Asking the kernel which of many sockets are ready is cheaper than trying each.
constexpr std::size_t kTryEach = 6;
// The hint that a connection has come can be taken by someone else who waits, so it is not relied on for longer.
constexpr auto kConnectionLook = 5ms;
// Rings have no descriptor: with sockets pending as well, they are looked at this often.
constexpr auto kMixedLook = 200us;
// An abort is seen at the latest after this while only rings are awaited.
constexpr auto kLocalLook = 5ms;

timespec to_timespec(Deadline::Duration duration) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

}  // namespace

struct Exchange::Impl {
  Impl(Mesh::Impl& mesh_state, std::span<const int> member_ranks, const Signature& call, Deadline until)
      : mesh(mesh_state),
        members(member_ranks.begin(), member_ranks.end()),
        signature(call),
        deadline(until),
        began(Clock::now()) {
    MANIPLE_ASSERT(!mesh.busy);
    if (!mesh.broken.empty()) throw Aborted("a message was cut short earlier: " + mesh.broken);
    const auto own = std::find(members.begin(), members.end(), mesh.options.rank);
    MANIPLE_ASSERT(own != members.end());
    rank = static_cast<int>(own - members.begin());
    mesh.busy = true;
  }

  ~Impl() {
    if (mesh.broken.empty() && (!senders.empty() || !receivers.empty())) {
      mesh.broken = signature.describe() + " ended before its messages were complete";
    }
    if (!mesh.broken.empty()) {
      for (const auto& lane : mesh.senders) {
        if (lane) lane->abandon();
      }
      for (const auto& lane : mesh.receivers) {
        if (lane) lane->abandon();
      }
    }
    mesh.transfers.clear();
    mesh.busy = false;
  }

  /// Runs `body`; any failure leaves lanes in the middle of frames, so the mesh is of no use afterwards.
  template <class Body>
  auto guarded(Body body) {
    try {
      return body();
    } catch (const std::exception& error) {
      if (mesh.broken.empty()) mesh.broken = error.what();
      throw;
    }
  }

  Transfer& add_transfer(std::size_t size) {
    Transfer& transfer = mesh.transfers.emplace_back();
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
    for (RecvLane* lane : receivers) moved |= lane->advance();
    for (SendLane* lane : senders) moved |= lane->advance();
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
    std::erase_if(receivers, [](const RecvLane* lane) { return !lane->pending(); });
    std::erase_if(senders, [](const SendLane* lane) { return !lane->pending(); });
  }

  template <class Done>
  void wait_until(Done done) {
    Clock::time_point idle_since{};
    for (;;) {
      const bool aborted = mesh.options.abort->raised();
      const bool moved = advance();
      if (done()) return;  // what has arrived counts, whatever happened meanwhile
      if (aborted) mesh.options.abort->rethrow();
      const auto now = Clock::now();
      if (now >= deadline.when()) throw Timeout(timeout_text(now));
      if (moved) {
        idle_since = {};
      } else if (idle_since == Clock::time_point{}) {
        idle_since = now;
      } else if (now - idle_since < kSpin) {
        ::sched_yield();
      } else {
        wait_for_events();
      }
    }
  }

  /// Until something that is awaited may have happened.
  void wait_for_events() {
    bool awaits_connection = false;
    bool awaits_ring = false;
    descriptors.clear();
    descriptors.push_back({mesh.options.abort->fd(), POLLIN, 0});
    for (const SendLane* lane : senders) {
      awaits_ring |= lane->local();
      lane->add_descriptors(descriptors);
    }
    for (const RecvLane* lane : receivers) {
      awaits_ring |= lane->local();
      awaits_connection |= lane->awaits_connection();
      lane->add_descriptors(descriptors);
    }
    std::erase_if(descriptors, [](const pollfd& entry) { return entry.fd < 0; });
    if (awaits_ring && !awaits_connection && descriptors.size() == 1 && mesh.options.local_wait) {
      mesh.options.local_wait(Deadline::sooner(deadline, Deadline::after(kLocalLook)));
      return;
    }
    auto limit = deadline.remaining();
    if (awaits_connection) {
      descriptors.push_back({mesh.options.connector->arrival_fd(), POLLIN, 0});
      limit = std::min<Deadline::Duration>(limit, kConnectionLook);
    }
    if (awaits_ring) limit = std::min<Deadline::Duration>(limit, kMixedLook);
    const timespec time = to_timespec(limit);
    const bool forever = limit == Deadline::Duration::max();
    if (::ppoll(descriptors.data(), descriptors.size(), forever ? nullptr : &time, nullptr) < 0 && errno != EINTR) {
      throw_system_error("ppoll");
    }
  }

  std::string timeout_text(Clock::time_point now) const {
    std::string text = fmt::format("no completion after {:.1f} s", std::chrono::duration<double>(now - began).count());
    const char* separator = "; still awaiting ";
    for (const RecvLane* lane : receivers) {
      text += fmt::format("{}{} ({})", separator, lane->peer().name(), lane->progress());
      separator = ", ";
    }
    separator = "; not taking what is sent: ";
    for (const SendLane* lane : senders) {
      text += fmt::format("{}{} ({})", separator, lane->peer().name(), lane->progress());
      separator = ", ";
    }
    return text;
  }

  Mesh::Impl& mesh;
  std::vector<int> members;
  Signature signature;
  Deadline deadline;
  Clock::time_point began;
  int rank = 0;
  std::vector<SendLane*> senders;  // those with messages on the way
  std::vector<RecvLane*> receivers;
  std::vector<pollfd> descriptors;
  std::vector<std::size_t> marks;  // which lane a descriptor belongs to
};

Exchange::Exchange(Mesh& mesh, std::span<const int> members, const Signature& signature, Deadline deadline)
    : impl_(std::make_unique<Impl>(mesh.impl(), members, signature, deadline)) {}
Exchange::~Exchange() = default;

int Exchange::rank() const noexcept { return impl_->rank; }
int Exchange::size() const noexcept { return static_cast<int>(impl_->members.size()); }

Exchange::Ticket Exchange::send(int peer, std::span<const std::byte> bytes) {
  return impl_->guarded([&] {
    impl_->mesh.options.abort->check();
    SendLane& lane = impl_->mesh.sender(impl_->members[static_cast<std::size_t>(peer)]);
    Transfer& transfer = impl_->add_transfer(bytes.size());
    transfer.from = bytes.data();
    const bool was_idle = !lane.pending();
    lane.post(transfer, impl_->deadline);
    // At once, so that the header is on its way whatever happens here: the peer learns what this rank called.
    if (was_idle) lane.advance();
    if (was_idle && lane.pending()) impl_->senders.push_back(&lane);
    return static_cast<Ticket>(impl_->mesh.transfers.size() - 1);
  });
}

Exchange::Ticket Exchange::recv(int peer, std::span<std::byte> bytes) {
  RecvLane& lane = impl_->mesh.receiver(impl_->members[static_cast<std::size_t>(peer)]);
  Transfer& transfer = impl_->add_transfer(bytes.size());
  transfer.to = bytes.data();
  if (!lane.pending()) impl_->receivers.push_back(&lane);
  lane.post(transfer);
  return static_cast<Ticket>(impl_->mesh.transfers.size() - 1);
}

void Exchange::wait(Ticket ticket) {
  const Transfer& transfer = impl_->mesh.transfers[ticket];
  if (transfer.done) return;
  impl_->guarded([&] { impl_->wait_until([&] { return transfer.done; }); });
}

void Exchange::wait_all() {
  if (impl_->senders.empty() && impl_->receivers.empty()) return;
  impl_->guarded([&] { impl_->wait_until([this] { return impl_->senders.empty() && impl_->receivers.empty(); }); });
}

void Exchange::progress() {
  impl_->guarded([this] {
    impl_->mesh.options.abort->check();
    impl_->advance();
  });
}

std::span<std::byte> Exchange::scratch(std::size_t bytes) { return impl_->mesh.scratch(bytes); }

}  // namespace maniple
