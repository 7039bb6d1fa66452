// Runs every operation over a plugin.
//
//   1. Ranks compare their calls: each pair exchanges one header each way over the plugin's channels. This round's
//      deadline identifies late ranks, so plugins need not. (MANIPLE_CHECKS=0 skips the round.)
//   2. The plugin's own collective runs, if it has one with the right result. Otherwise the native backend's TCP
//      algorithms run over the plugin's channels, with bit-identical results; they compare calls by themselves.
//
// Messages use the native backend's engine, over channels of their own.
#include "comm/backend/plugin/load.h"

#include <sched.h>
#include <time.h>

#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "comm/base/abort_signal.h"
#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/error_codec.h"
#include "comm/collective/algorithms.h"
#include "comm/collective/reduce/reduce.h"
#include "comm/collective/shm/arena_call.h"
#include "comm/net/address.h"
#include "comm/shm/registered_table.h"
#include "comm/transport/mesh.h"
#include "comm/transport/message_engine.h"
#include "comm/transport/ring_channel.h"

namespace maniple {
namespace {

/// Plugin channels cannot be waited for; they are polled at this interval.
constexpr long kPollNs = 50'000;
constexpr std::size_t kOwnRing = 256 * 1024;

void pause_between_polls() {
  const timespec time{0, kPollNs};
  ::nanosleep(&time, nullptr);  // sleep: a plugin channel can only be polled
}

void reduce_pair(DType dtype, ReduceOp op, void* into, const void* a, const void* b, std::size_t count) {
  const void* const sources[] = {a, b};
  void* const destinations[] = {into};
  reduce({.dtype = dtype, .op = op}, sources, destinations, count);
}

bool has_result(const Operation& op, int rank) noexcept { return op.op != Op::reduce || op.root == rank; }

/// Number of elements a rank holds after a reduction.
std::size_t result_count(const Operation& op, int rank) noexcept {
  return op.op == Op::reduce_scatter ? op.parts.count(rank) : op.count;
}

bool is_empty(const Operation& op) noexcept {
  switch (op.op) {
    case Op::barrier: return false;
    case Op::broadcast:
    case Op::reduce:
    case Op::all_reduce: return op.count == 0;
    case Op::all_to_all: return false;  // empty here does not mean empty on other ranks
    default: return op.parts.total() == 0;
  }
}

class PluginBackend final : public Backend {
 public:
  PluginBackend(const BackendContext& context, const PluginEntry& entry)
      : context_(context),
        topology_(context_.topology),
        registered_(std::make_shared<RegisteredTable>()),
        abort_(*context_.abort),
        store_(make_prefix_store("maniple/plugin/" + context_.group, context_.session->store())) {
    all_ranks_.resize(topology_.size());
    std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
    for (const auto& member : topology_.members) global_ranks_.push_back(member.global_rank);
    if (topology_.size() > 1) {
      make_plugin(entry);
      make_mesh();
    }
    make_messages();
  }

  ~PluginBackend() override {
    listener_.reset();
    messages_.reset();  // destroy channels before their plugin
    mesh_.reset();
    plugin_.reset();
  }

  std::string_view transport() const noexcept override { return plugin_ ? plugin_->name() : "none"; }
  bool all_share_memory() const noexcept override { return false; }

  void run(const Operation& op, OperationContext& op_context) override {
    context_.abort->check();
    if (!plugin_) return run_alone(op);
    Operation own = op;  // the operation as passed to the plugin
    const bool averages =
        op.reduce.kind() == ReduceOp::avg && (op.dtype == DType::float32 || op.dtype == DType::float64);
    if (averages) own.reduce = ReduceOp::sum;
    // Comparing calls already is a barrier.
    if ((compare_ && op.op == Op::barrier) || is_empty(op) || !context_.algorithm.empty() || !plugin_->can(own)) {
      return run_supplied(op, op_context.deadline());
    }
    if (compare_) compare(op, op_context.deadline());
    run_by_plugin(own, op_context.deadline());
    if (averages && has_result(op, topology_.rank)) divide(op);
  }

  void start(std::span<const std::shared_ptr<Message>> messages, bool background) override {
    messages_->start(messages, background);
  }
  void drive(Message& message) override { messages_->drive(message); }
  AwaitedMessages awaited() override { return messages_->awaited(); }

  // Plugins cannot use memory that ranks share, so this is plain memory.
  RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t, Deadline) override {
    const std::size_t own[] = {sizes[topology_.rank]};
    return registered_->add(Segment::create(RegisteredTable::segment_bytes(own)), own, 0);
  }

 private:
  class GroupAbortToken final : public AbortToken {
   public:
    explicit GroupAbortToken(const AbortSignal& abort) : abort_(abort) {}
    bool aborted() const noexcept override { return abort_.raised(); }

   private:
    const AbortSignal& abort_;
  };

  void make_plugin(const PluginEntry& entry) {
    PluginContext options;
    options.group = context_.group;
    options.rank = topology_.rank;
    options.global_ranks = global_ranks_;
    for (const int rank : global_ranks_) {
      if (rank != context_.session->rank() && context_.session->same_host(rank))
        options.pids.push_back(context_.session->peer(rank).pid);
    }
    options.world_size = context_.session->world_size();
    options.address = Address::parse(context_.session->peer(context_.session->rank()).tcp_address).host();
    options.store = store_.get();
    options.deadline = context_.deadline;
    options.abort = &abort_;
    options.pair_reduce = reduce_pair;
    options.most = knob_integer(Knob::mpi_piece);
    try {
      plugin_ = entry.make(options);
    } catch (const Error&) {
      context_.abort->check();
      throw;
    } catch (const std::exception& error) {
      context_.abort->check();
      throw SystemError(fmt::format("setting up {} failed: {}", entry.version, error.what()), 0);
    }
    listener_.emplace(*context_.abort, [plugin = plugin_.get(), abort = context_.abort.get()] {
      plugin->interrupt(info_of(abort->cause()).loss != LossKind::left);
    });
  }

  void make_mesh() {
    MeshOptions options;
    options.topic = context_.group + ":c";
    options.rank = topology_.rank;
    options.global_ranks = global_ranks_;
    options.connector = context_.session.get();
    options.abort = context_.abort.get();
    options.streams = static_cast<int>(knob_integer(Knob::tcp_streams));
    options.local_sink = [this](int rank) { return plugin_->sink(rank, Traffic::collectives); };
    options.local_source = [this](int rank) { return plugin_->source(rank, Traffic::collectives); };
    options.local_wait = [](Deadline) { pause_between_polls(); };
    mesh_ = std::make_unique<Mesh>(std::move(options));
  }

  void make_messages() {
    MessageEngineOptions options;
    options.topic = context_.group + ":m";
    options.rank = topology_.rank;
    options.global_ranks = global_ranks_;
    options.connector = context_.session.get();
    options.abort = context_.abort.get();
    options.unexpected_limit = knob_integer(Knob::unexpected_mib) << 20;
    options.local_sink = [this](int rank) {
      return rank == topology_.rank ? make_ring_sink(own_ring()) : plugin_->sink(rank, Traffic::messages);
    };
    options.local_source = [this](int rank) {
      return rank == topology_.rank ? make_ring_source(own_ring()) : plugin_->source(rank, Traffic::messages);
    };
    options.notifications = [] { return std::uint32_t{0}; };
    options.await_notification = [](std::uint32_t, Deadline) { pause_between_polls(); };
    messages_ = std::make_unique<MessageEngine>(std::move(options));
  }

  void run_supplied(const Operation& op, Deadline deadline) {
    Exchange exchange(*mesh_, all_ranks_, Signature::of(op), deadline);
    choose_mesh_algorithm(op, topology_.size(), context_.algorithm).run(exchange, op);
  }

  void compare(const Operation& op, Deadline deadline) {
    Exchange exchange(*mesh_, all_ranks_, Signature::of(op), deadline);
    post_headers(exchange);
    exchange.wait_all();
  }

  void run_by_plugin(const Operation& op, Deadline deadline) {
    const auto began = Deadline::Clock::now();
    try {
      if (plugin_->run(op, deadline)) return;
    } catch (const Error&) {
      context_.abort->check();  // throws the first cause instead of its consequence
      throw;
    } catch (const std::exception& error) {
      context_.abort->check();
      throw SystemError(fmt::format("{}: {}", plugin_->name(), error.what()), 0);
    }
    context_.abort->check();
    const double waited = std::chrono::duration<double>(Deadline::Clock::now() - began).count();
    throw Timeout(fmt::format("timed out after {:.1f} s, inside {}", waited, plugin_->name()), {}, waited);
  }

  void divide(const Operation& op) {
    const std::size_t count = result_count(op, topology_.rank);
    const void* const sources[] = {op.out};
    void* const destinations[] = {op.out};
    reduce({.dtype = op.dtype, .op = op.reduce, .premultiply = true, .divide_by = topology_.size()}, sources,
           destinations, count);
  }

  // Carries messages that a rank sends to itself.
  std::span<std::byte> own_ring() {
    if (!own_ring_) own_ring_ = Segment::create(ring_bytes(kOwnRing));
    return {own_ring_->data(), own_ring_->size()};
  }

  BackendContext context_;
  const Topology& topology_;
  std::shared_ptr<RegisteredTable> registered_;
  GroupAbortToken abort_;
  std::shared_ptr<Store> store_;
  bool compare_ = knob_flag(Knob::checks);
  std::vector<int> all_ranks_;
  std::vector<int> global_ranks_;
  std::shared_ptr<Segment> own_ring_;
  std::unique_ptr<Plugin> plugin_;
  std::optional<AbortListener> listener_;  // uses the plugin
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<MessageEngine> messages_;
};

}  // namespace

std::unique_ptr<Backend> make_plugin_backend(const BackendContext& context, const PluginEntry& entry) {
  return std::make_unique<PluginBackend>(context, entry);
}

}  // namespace maniple
