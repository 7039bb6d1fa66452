// The system "native", Maniple itself: starts this program again as `bench-worker`, one process per rank (for loopback,
// one process with a thread per rank). Also contains the worker.
#include <exception>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "comm/backend/plugin/load.h"
#include "comm/base/environment.h"
#include "comm/base/mutex.h"
#include "tools/bench/measure.h"
#include "tools/bench/system.h"
#include <maniple/comm.h>

namespace maniple::bench {
namespace {

class NativeSystem : public System {
 public:
  explicit NativeSystem(bool bare) : bare_(bare) {}

  std::string name() const override { return bare_ ? "bare" : "native"; }
  Role role() const override { return Role::native; }
  std::string missing(const Testbed&) const override { return ""; }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed& testbed) const override {
    const bool sharing =
        requested.transport != "tcp" && (!testbed.several_hosts() || requested.ranks > testbed.network->hosts());
    if (requested.buffer == "registered" && !sharing) return {};  // without sharing, the same as ordinary
    if (requested.buffer == "registered" && requested.op == "barrier") return {};
    if (testbed.several_hosts() && (requested.transport == "shm" || requested.transport == "loopback")) return {};
    WorkItem item = requested;
    item.backend = name();
    return {item};
  }

  std::vector<ChildSpec> processes(const WorkItem& item, const Testbed& testbed) const override {
    const bool threads = item.transport == "loopback";
    const std::string rendezvous = new_rendezvous(testbed);
    const std::string secret = write_secret(testbed.scratch->new_path("secret"));
    std::vector<ChildSpec> result;
    for (int rank = 0; rank < (threads ? 1 : item.ranks); ++rank) {
      ChildSpec spec;
      spec.name = threads ? "native (ranks as threads)" : fmt::format("{} rank {}", name(), rank);
      spec.argv = {testbed.program, "bench-worker", to_json_text(item), std::to_string(rank), rendezvous};
      spec.environment = {{"MANIPLE_SECRET_FILE", secret}};
      if (bare_) {
        for (const char* knob : {"MANIPLE_CHECKS", "MANIPLE_RECORDER", "MANIPLE_HEARTBEAT"})
          spec.environment.emplace_back(knob, "0");
      }
      if (!threads) spec.core = core_for(rank, item.ranks);
      if (testbed.several_hosts())
        spec.network = testbed.network->descriptor(testbed.network->host_of(rank, item.ranks));
      result.push_back(std::move(spec));
    }
    return result;
  }

 private:
  bool bare_;
};

/// The same program and ranks, with the gloo backend.
class PluginGloo final : public NativeSystem {
 public:
  PluginGloo() : NativeSystem(false) {}
  std::string name() const override { return "maniple-gloo"; }
  Role role() const override { return Role::plugin; }
  std::string missing(const Testbed&) const override { return missing_plugin("gloo"); }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed&) const override {
    return plugin_work_items(requested, name());
  }
};

}  // namespace

std::unique_ptr<System> make_plugin_gloo_system() { return std::make_unique<PluginGloo>(); }
std::unique_ptr<System> make_native_system() { return std::make_unique<NativeSystem>(false); }
std::unique_ptr<System> make_bare_system() { return std::make_unique<NativeSystem>(true); }

namespace {

class NativeCommunicator final : public Communicator {
 public:
  NativeCommunicator(std::shared_ptr<ProcessGroup> group, const WorkItem& item)
      : group_(std::move(group)), registered_(item.buffer == "registered") {}

  int rank() const override { return group_->rank(); }
  std::string transport() const override { return std::string(group_->transport()); }

  std::byte* memory(std::size_t bytes) override {
    if (!registered_) return ordinary_memory_.at_least(bytes);
    if (bytes > registered_memory_.size()) {
      registered_memory_ = RegisteredMemory();
      registered_memory_ = group_->allocate(bytes);
    }
    return static_cast<std::byte*>(registered_memory_.data());
  }

  void prepare(const Case& what, std::byte* in, std::byte* out) override {
    const int me = group_->rank();
    op_ = what.op;
    reduce_ = what.reduce;
    in_ = {in, what.in_count(me), what.dtype};
    out_ = {out, what.out_count(me), what.dtype};
  }

  void call() override {
    switch (op_) {
      case Op::all_reduce: group_->all_reduce(out_, reduce_); break;
      case Op::broadcast: group_->broadcast(out_, 0); break;
      case Op::reduce: group_->reduce(in_, out_, 0, reduce_); break;
      case Op::gather: group_->gather(in_, out_, 0); break;
      case Op::all_gather: group_->all_gather(in_, out_); break;
      case Op::scatter: group_->scatter(in_, out_, 0); break;
      case Op::reduce_scatter: group_->reduce_scatter(in_, out_, reduce_); break;
      case Op::all_to_all: group_->all_to_all(in_, out_); break;
      case Op::barrier: group_->barrier(); break;
      case Op::send: ping_pong(); break;
      default: throw Unsupported("not measured: " + std::string(to_string(op_)));
    }
  }

  std::uint64_t largest(std::uint64_t value) override {
    auto number = static_cast<std::int64_t>(value);
    group_->all_reduce(buffer_of(number), ReduceOp::max);
    return static_cast<std::uint64_t>(number);
  }

 private:
  void ping_pong() {
    const int me = group_->rank();
    if (me == 0) group_->send(out_, 1);
    if (me < 2) group_->recv(out_, 1 - me);
    if (me == 1) group_->send(out_, 0);
  }

  std::shared_ptr<ProcessGroup> group_;
  bool registered_;
  PageMemory ordinary_memory_;
  RegisteredMemory registered_memory_;
  Op op_ = Op::barrier;
  ReduceOp reduce_;
  ConstBuffer in_;
  Buffer out_;
};

constexpr std::string_view kPluginPrefix = "maniple-";

InitOptions init_options(const WorkItem& item, int rank) {
  InitOptions options;
  options.rank = rank;
  options.world_size = item.ranks;
  options.timeout = Seconds(item.timeout_s);
  options.init_timeout = Seconds(30);
  options.transport = parse_transport(item.transport);
  options.algorithm = item.algorithm;
  if (item.backend.starts_with(kPluginPrefix)) options.backend = item.backend.substr(kPluginPrefix.size());
  // mpirun assigns the ranks.
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    if (options.backend == "mpi")
      options.rank = static_cast<int>(environment_integer(name, 0, 1 << 20).value_or(options.rank));
  }
  return options;
}

void run_rank(std::shared_ptr<ProcessGroup> group, const WorkItem& item) {
  NativeCommunicator communicator(group, item);
  measure_and_print(communicator, item);
  group->barrier();  // do not leave while other ranks still need this one
}

void run_threads(const WorkItem& item) {
  const std::shared_ptr<Store> store = make_memory_store();
  std::exception_ptr first;
  Mutex mutex;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < item.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run_rank(init(store, init_options(item, rank)), item);
      } catch (...) {
        const MutexLock lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  threads.clear();
  if (first) std::rethrow_exception(first);
}

}  // namespace

void run_worker(const WorkItem& item, int rank, const std::string& rendezvous) {
  if (item.transport == "loopback") return run_threads(item);
  InitOptions options = init_options(item, rank);
  options.init_method = rendezvous;
  run_rank(init(options), item);
}

}  // namespace maniple::bench
