// The native backend: an arena between ranks on one host, a mesh between hosts, and a hierarchy of both if hosts have
// several ranks. `run` uses the one that fits the group.

#include <algorithm>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "comm/backend/backend.h"
#include "comm/base/abort_signal.h"
#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/collective/algorithms.h"
#include "comm/collective/hierarchy.h"
#include "comm/collective/shm/arena_call.h"
#include "comm/shm/arena.h"
#include "comm/shm/registered_table.h"
#include "comm/transport/mesh.h"
#include "comm/transport/message_engine.h"
#include "comm/transport/ring_channel.h"

namespace maniple {
namespace {

constexpr int kCollectiveRings = 0;
constexpr int kMessageRings = 1;

class NativeBackend final : public Backend {
 public:
  explicit NativeBackend(const BackendContext& context)
      : context_(context), topology_(context_.topology), registered_(std::make_shared<RegisteredTable>()) {
    check_transport();
    const auto& local = topology_.nodes[topology_.node_rank()];
    if (context_.transport != TransportKind::tcp && local.size() > 1) make_arena(local);
    if (topology_.size() > 1 && (topology_.node_count() > 1 || context_.transport == TransportKind::tcp)) make_mesh();
    make_messages();
    if (arena_ && mesh_) hierarchy_ = std::make_unique<Hierarchy>(topology_, arena_.get(), *registered_, *mesh_);
    if (!arena_ && mesh_ && topology_.node_count() > 1 && context_.transport != TransportKind::tcp) {
      // Alone on this host, but other hosts may have several ranks, and all must use the same algorithms.
      if (largest_host() > 1) hierarchy_ = std::make_unique<Hierarchy>(topology_, nullptr, *registered_, *mesh_);
    }
  }

  ~NativeBackend() override {
    listener_.reset();
    messages_.reset();  // its rings lie in the arena
    hierarchy_.reset();
    mesh_.reset();
  }

  std::string_view transport() const noexcept override {
    if (topology_.size() == 1) return "none";
    if (hierarchy_) return "shm+tcp";
    if (mesh_) return "tcp";
    return all_in_process_ ? "loopback" : "shm";
  }

  bool all_share_memory() const noexcept override { return !mesh_; }

  void mark_gone(int rank) noexcept override {
    if (arena_ && on_this_host(rank)) arena_->mark_gone(local_index(rank));
  }

  bool reports_publication() const noexcept override { return arena_ && !hierarchy_; }

  void run(const Operation& op, OperationContext& op_context) override {
    if (topology_.size() == 1) {
      context_.abort->check();
      return run_alone(op);
    }
    if (hierarchy_) return hierarchy_->run(op, op_context, compare_, context_.algorithm);
    if (arena_) {
      ArenaCall call{*arena_, *registered_, op_context, Signature::of(op), compare_, context_.algorithm};
      return run_in_arena(call, op);
    }
    Exchange exchange(*mesh_, all_ranks_, Signature::of(op), op_context.deadline());
    choose_mesh_algorithm(op, topology_.size(), context_.algorithm).run(exchange, op);
  }

  bool try_now(Message& message) override { return messages_->try_now(message); }
  void start(std::span<const std::shared_ptr<Message>> messages, bool background) override {
    messages_->start(messages, background);
  }
  void drive(Message& message) override { messages_->drive(message); }
  AwaitedMessages awaited() override { return messages_->awaited(); }

  RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) override {
    const auto& local = topology_.nodes[topology_.node_rank()];
    std::vector<std::size_t> local_sizes;
    for (const int rank : local) local_sizes.push_back(sizes[rank]);
    if (!arena_) local_sizes = {sizes[topology_.rank]};
    const std::size_t bytes = RegisteredTable::segment_bytes(local_sizes);
    // Without an arena no rank can share the memory; it works the same for its user.
    auto segment = arena_ ? context_.session->share_segment(fmt::format("{}:memory{}", context_.group, number),
                                                            global_ranks(local), bytes, deadline, *context_.abort)
                          : Segment::create(bytes);
    return registered_->add(std::move(segment), local_sizes, arena_ ? topology_.local_rank() : 0);
  }

  RegisteredMemory allocate_shared(std::size_t bytes, std::uint64_t number, Deadline deadline) override {
    if (context_.transport == TransportKind::tcp && largest_host() > 1) {
      throw Unsupported("allocate_shared: with transport tcp ranks of a host share no memory; use transport auto");
    }
    const std::size_t mapped = std::max<std::size_t>(bytes, 1);
    const auto& local = topology_.nodes[topology_.node_rank()];
    auto segment = arena_ ? context_.session->share_segment(fmt::format("{}:memory{}", context_.group, number),
                                                            global_ranks(local), mapped, deadline, *context_.abort)
                          : Segment::create(mapped);
    if (topology_.local_rank() == 0) segment->populate(0, mapped);
    segment->share_with_children();
    void* data = segment->data();
    return {data, bytes, std::move(segment)};
  }

 private:
  void check_transport() {
    const bool one_host = topology_.node_count() == 1;
    all_in_process_ = true;
    for (const auto& member : topology_.members) all_in_process_ &= context_.session->same_process(member.global_rank);
    MANIPLE_REQUIRE(context_.transport != TransportKind::shm || one_host,
                    "transport shm was requested, but the ranks are on {} hosts; use auto or tcp",
                    topology_.node_count());
    MANIPLE_REQUIRE(context_.transport != TransportKind::loopback || all_in_process_,
                    "transport loopback was requested, but the ranks are not threads of one process; use auto");
    all_ranks_.resize(topology_.size());
    std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  }

  std::size_t largest_host() const {
    std::size_t most = 0;
    for (const auto& node : topology_.nodes) most = std::max(most, node.size());
    return most;
  }

  std::vector<int> global_ranks(const std::vector<int>& ranks) const {
    std::vector<int> result;
    for (const int rank : ranks) result.push_back(topology_.members[rank].global_rank);
    return result;
  }

  /// Number of cores that the group's ranks on this host may use in total; each rank may be bound to a few of them.
  int usable_cores(const std::vector<int>& local) const {
    CoreSet cores;
    for (const int rank : global_ranks(local)) cores.add(context_.session->peer(rank).cores);
    return std::max(1, cores.count());
  }

  void make_arena(const std::vector<int>& local) {
    ArenaOptions options;
    options.rank = topology_.local_rank();
    options.size = static_cast<int>(local.size());
    options.cores = usable_cores(local);
    std::size_t stage = knob_integer(Knob::stage_kib) * 1024;
    if (stage == 0) stage = ArenaLayout::usual_stage_bytes(options.size);
    options.spin_us = knob_number(Knob::spin_us);
    options.abort = context_.abort.get();
    options.names = local;
    options.global_ranks = global_ranks(local);
    auto segment =
        context_.session->share_segment(context_.group + ":arena", options.global_ranks,
                                        ArenaLayout::of(options.size, stage).bytes, context_.deadline, *context_.abort);
    arena_ = std::make_unique<Arena>(std::move(segment), options);
    listener_.emplace(*context_.abort,
                      [arena = arena_.get(), abort = context_.abort.get()] { arena->raise(abort->cause()); });
  }

  void make_mesh() {
    MeshOptions options;
    options.topic = context_.group + ":c";
    options.rank = topology_.rank;
    options.global_ranks = global_ranks(all_ranks_);
    options.connector = context_.session.get();
    options.abort = context_.abort.get();
    options.streams = static_cast<int>(knob_integer(Knob::tcp_streams));
    const std::vector<int>& local = topology_.nodes[topology_.node_rank()];
    options.waiting =
        WaitPolicy::for_sockets(static_cast<int>(local.size()), usable_cores(local), knob_number(Knob::spin_us));
    if (arena_) {
      options.local_sink = [this](int rank) { return ring_sink(kCollectiveRings, rank); };
      options.local_source = [this](int rank) { return ring_source(kCollectiveRings, rank); };
      options.local_wait = [this](Deadline deadline) {
        arena_->await_notification(notifications_seen_, deadline);
        notifications_seen_ = arena_->notifications();
      };
    }
    mesh_ = std::make_unique<Mesh>(std::move(options));
  }

  void make_messages() {
    MessageEngineOptions options;
    options.topic = context_.group + ":m";
    options.rank = topology_.rank;
    options.global_ranks = global_ranks(all_ranks_);
    options.connector = context_.session.get();
    options.abort = context_.abort.get();
    options.unexpected_limit = knob_integer(Knob::unexpected_mib) << 20;
    options.local_sink = [this](int rank) { return ring_sink(kMessageRings, rank); };
    options.local_source = [this](int rank) { return ring_source(kMessageRings, rank); };
    if (arena_) {
      options.slots_to = [this](int rank) { return slots(rank, true); };
      options.slots_from = [this](int rank) { return slots(rank, false); };
      options.notifications = [this] { return arena_->notifications(); };
      options.await_notification = [this](std::uint32_t seen, Deadline deadline) {
        arena_->await_notification(seen, deadline);
      };
      options.waiter = &arena_->waiter();
      options.notify_self = [this] { arena_->notify(arena_->rank()); };
      options.departure_of = [this](int rank) {
        return on_this_host(rank) ? arena_->departure_of(local_index(rank)) : LossKind::unknown;
      };
      options.aborted_by_peer = [this] { return arena_->raised(); };
    }
    messages_ = std::make_unique<MessageEngine>(std::move(options));
  }

  bool on_this_host(int rank) const { return topology_.members[rank].node_rank == topology_.node_rank(); }
  int local_index(int rank) const { return topology_.members[rank].local_rank; }

  std::unique_ptr<ByteSink> ring_sink(int set, int rank) {
    if (rank == topology_.rank) return make_ring_sink(own_ring());
    if (!arena_ || !on_this_host(rank)) return nullptr;
    const int peer = local_index(rank);
    return make_ring_sink(arena_->ring(set, arena_->rank(), peer), [this, peer] { arena_->notify(peer); });
  }
  std::unique_ptr<ByteSource> ring_source(int set, int rank) {
    if (rank == topology_.rank) return make_ring_source(own_ring());
    if (!arena_ || !on_this_host(rank)) return nullptr;
    const int peer = local_index(rank);
    return make_ring_source(arena_->ring(set, peer, arena_->rank()), [this, peer] { arena_->notify(peer); });
  }
  std::unique_ptr<MessageSlots> slots(int rank, bool out) {
    if (rank == topology_.rank || !on_this_host(rank)) return nullptr;
    const int peer = local_index(rank);
    const int self = arena_->rank();
    return std::make_unique<MessageSlots>(arena_->slots(out ? self : peer, out ? peer : self),
                                          [this, peer] { arena_->notify(peer); });
  }
  // Carries messages that a rank sends to itself.
  std::span<std::byte> own_ring() {
    constexpr std::size_t kBytes = 256 * 1024;
    if (!own_ring_) own_ring_ = Segment::create(ring_bytes(kBytes));
    return {own_ring_->data(), own_ring_->size()};
  }

  BackendContext context_;
  const Topology& topology_;
  std::shared_ptr<RegisteredTable> registered_;
  bool compare_ = knob_flag(Knob::checks);
  bool all_in_process_ = false;
  std::vector<int> all_ranks_;
  std::uint32_t notifications_seen_ = 0;  // by the mesh, which only one thread uses at a time
  std::shared_ptr<Segment> own_ring_;
  std::unique_ptr<Arena> arena_;
  std::optional<AbortListener> listener_;  // uses the arena
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<MessageEngine> messages_;
  std::unique_ptr<Hierarchy> hierarchy_;
};

}  // namespace

std::unique_ptr<Backend> make_native_backend(const BackendContext& context) {
  return std::make_unique<NativeBackend>(context);
}

}  // namespace maniple
