// A backend on top of a device plugin: "cuda" and "nccl".
//
//   enqueue -> order after the group's last operation on a device -> engine enqueues, and records the end -> watcher
//
// If the engine cannot report whether it waits for other ranks, an event "started" is recorded first.
#include <algorithm>

#include <fmt/format.h>

#include "comm/backend/backend.h"
#include "comm/backend/device/device_plugin.h"
#include "comm/backend/device/device_streams.h"
#include "comm/backend/plugin/load.h"
#include "comm/base/abort_signal.h"
#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/log.h"
#include "comm/base/threads.h"

namespace maniple {
namespace {

class GroupDescriptors final : public DescriptorExchange {
 public:
  explicit GroupDescriptors(const BackendContext& context) : context_(context) {}
  int share(std::string_view topic, int maker, int descriptor, Deadline deadline) override {
    const Topology& topology = context_.topology;
    const auto& local = topology.nodes[topology.node_rank()];
    std::vector<int> members = {topology.members[maker].global_rank};
    for (const int rank : local) {
      if (rank != maker) members.push_back(topology.members[rank].global_rank);
    }
    if (members.size() == 1) return -1;
    return context_.session
        ->share_descriptor(fmt::format("{}:device:{}:{}", context_.group, topic, maker), members, descriptor, deadline,
                           *context_.abort)
        .release();
  }

 private:
  const BackendContext& context_;
};

class SignalToken final : public AbortToken {
 public:
  explicit SignalToken(const AbortSignal& signal) : signal_(signal) {}
  bool aborted() const noexcept override { return signal_.raised(); }

 private:
  const AbortSignal& signal_;
};

/// Frees registered device memory. That may wait for all work on the device, which may itself wait for a group's
/// thread, so it never happens on such a thread. (The watching thread releases memory that operations kept.)
void free_registered(void* memory) {
  auto* const registered = static_cast<RegisteredMemory*>(memory);
  if (!on_group_thread) {
    delete registered;
    return;
  }
  // At exit this is awaited before the device runtime shuts down, as the runtime was initialised earlier.
  static const bool kAwaited = (await_apart_at_exit(), true);
  (void)kAwaited;
  run_apart([registered] { delete registered; });  // if no thread can be started, the memory leaks
}

class DeviceBackend final : public Backend {
 public:
  DeviceBackend(const BackendContext& context, const DevicePluginEntry& entry)
      : context_(context),
        streams_(*context_.streams),
        runtime_(streams_.runtime()),
        alone_(context_.topology.size() == 1),
        store_(make_prefix_store("maniple/device/" + context_.group, context_.session->store())) {
    const Topology& topology = context_.topology;
    const int count = runtime_.device_count();
    device_ = context_.device < 0 ? topology.local_rank() % std::max(count, 1) : context_.device;
    MANIPLE_REQUIRE(device_ < count, "device {} was requested for rank {}, but this process sees {} GPUs", device_,
                    topology.rank, count);
    make_engine(entry);
    reports_waiting_ = engine_->waits() != DevicePlugin::Waits::unknown;
    streams_.bind(device_);
    streams_.watcher().watch_engine(*engine_);
  }

  ~DeviceBackend() override {
    if (!streams_.watcher().stop()) engine_->abort();
    // Before releasing memory that operations kept, which is not freed either while the device may be using it.
    if (!engine_->finish()) {
      log_warning(
          "[{}] rank {} left the group while cuda:{} was still busy with its operations: their memory stays until the "
          "process ends",
          context_.group, context_.topology.rank, device_);
    }
    streams_.watcher().end_all();
  }

  std::string_view transport() const noexcept override { return engine_->name(); }
  bool serves(Device device) const noexcept override { return device == Device::cuda(device_); }
  bool can(const Operation& op) const noexcept override { return engine_->can(op); }
  bool takes_turns() const noexcept override { return true; }
  bool has_messages(bool by_tags) const noexcept override { return !by_tags && engine_->has_messages(); }

  Enqueued enqueue(std::span<Operation> operations, const StreamCall& call) override {
    const Operation& first = operations.front();
    const DeviceStream caller{first.device.index, first.stream};
    const bool captured = runtime_.is_capturing(caller);
    if (captured && !engine_->can_capture()) {
      throw Unsupported(fmt::format("{}: {} cannot be captured into a CUDA graph; the backend cuda can",
                                    to_string(first.op), engine_->name()));
    }
    const DeviceStream stream = streams_.stream_for(caller, call.async_op, DeviceStreams::Purpose::collectives);
    streams_.order_after_last(stream, captured);
    StreamOperation pending;
    pending.work = streams_.make_work(stream, captured);
    pending.limit = alone_ ? Seconds::max() : call.limit;  // a single rank never waits
    pending.reported = reports_waiting_ && !alone_;
    if (!captured && !alone_ && !reports_waiting_) {
      pending.started = streams_.make_event(stream.device);
      runtime_.record(*pending.started, stream);
    }
    for (Operation& op : operations) {
      op.stream = stream.handle;
      call.begin(op);
    }
    StreamWatcher::Place place = streams_.watcher().begin(stream);
    try {
      enqueue_now(operations, pending.work->device.event, stream);
    } catch (const SystemError&) {
      streams_.watcher().await_first_cause();
      throw;
    }
    const Operation& last = operations.back();
    pending.context = streams_.watcher().context_of(to_string(last.op), last.seq);
    pending.recorded = true;
    return {watch(std::move(pending), std::move(place))};
  }

  std::vector<Work> enqueue_messages(std::span<const StreamMessage> messages, const StreamCall& call) override {
    std::vector<DeviceMessage> batch;
    for (const StreamMessage& one : messages) {
      const Message& message = *one.message;
      batch.push_back({message.op == Op::send, message.data, message.bytes, message.peer, message.tag});
    }
    const DeviceStream caller{messages.front().device.index, call.stream};
    const bool captured = runtime_.is_capturing(caller);
    const DeviceStream stream = streams_.stream_for(caller, call.async_op, DeviceStreams::Purpose::collectives);
    streams_.order_after_last(stream, captured);
    StreamOperation pending;
    pending.work = streams_.make_work(stream, captured);
    pending.limit = call.limit;
    pending.context = messages.front().context;
    if (!captured) {
      pending.started = streams_.make_event(stream.device);
      runtime_.record(*pending.started, stream);
    }
    StreamWatcher::Place place = streams_.watcher().begin(stream);
    engine_->enqueue_messages(batch, stream.handle);
    runtime_.record(*pending.work->device.event, stream);
    return {messages.size(), watch(std::move(pending), std::move(place))};
  }

  RegisteredMemory allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) override {
    auto* const memory = new RegisteredMemory(engine_->allocate(sizes, number, deadline));
    return {memory->data(), memory->size(), std::shared_ptr<void>(memory, free_registered)};
  }

 private:
  void make_engine(const DevicePluginEntry& entry) {
    DeviceContext context;
    context.group = context_.group;
    context.rank = context_.topology.rank;
    for (const auto& member : context_.topology.members) {
      context.global_ranks.push_back(member.global_rank);
      context.nodes.push_back(member.node_rank);
    }
    context.device = device_;
    context.store = store_.get();
    context.descriptors = &descriptors_;
    context.deadline = context_.deadline;
    context.abort = &abort_token_;
    context.compare = knob_flag(Knob::checks);
    try {
      engine_ = entry.make(context);
    } catch (...) {
      context_.abort->check();  // throws the first cause instead of its consequence
      throw;
    }
  }

  void enqueue_now(std::span<const Operation> operations, const std::shared_ptr<const DeviceEvent>& end,
                   DeviceStream stream) {
    bool recorded = false;
    if (operations.size() == 1) {
      recorded = engine_->enqueue(operations.front(), end->handle);
      engine_event_ = end;
    } else {
      engine_->begin_batch();
      for (const Operation& op : operations) engine_->enqueue(op);
      engine_->end_batch(stream.handle);
    }
    if (!recorded) runtime_.record(*end, stream);
  }

  /// Hands an operation whose end is recorded to the watcher.
  Work watch(StreamOperation pending, StreamWatcher::Place place) {
    auto work = pending.work;
    const DeviceEnd& end = work->device;
    if (!end.captured) streams_.set_last(end.event, end.stream);
    streams_.watcher().add(std::move(pending), std::move(place));
    return Work(work);
  }

  BackendContext context_;
  DeviceStreams& streams_;
  DeviceRuntime& runtime_;
  const bool alone_;
  int device_ = -1;
  GroupDescriptors descriptors_{context_};
  SignalToken abort_token_{*context_.abort};
  std::shared_ptr<Store> store_;
  std::shared_ptr<const DeviceEvent> engine_event_;  // the event the engine was given last
  std::unique_ptr<DevicePlugin> engine_;
  bool reports_waiting_ = false;  // DevicePlugin::waits
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const BackendContext& context) {
  return std::make_unique<DeviceBackend>(context, load_device_plugin("cuda"));
}

std::unique_ptr<Backend> make_nccl_backend(const BackendContext& context) {
  return std::make_unique<DeviceBackend>(context, load_device_plugin("nccl"));
}

}  // namespace maniple
