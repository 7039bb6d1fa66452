#include "comm/group/device_calls.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <bit>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/log.h"
#include "comm/group/group_impl.h"

namespace maniple {
namespace {

constexpr std::size_t kPiece = std::size_t{4} << 20;  // bytes per piece through host memory

std::size_t round_up(std::size_t bytes) { return (bytes + kWordStride - 1) / kWordStride * kWordStride; }

/// Elements in this rank's `in` and `out`; 0 for an unused buffer.
struct Extent {
  std::size_t in = 0;
  std::size_t out = 0;
};

Extent extent_of(const Operation& op, int rank) {
  const bool root = op.root == rank;
  switch (op.op) {
    case Op::broadcast: return root ? Extent{op.count, 0} : Extent{0, op.count};
    case Op::reduce: return {op.count, root ? op.count : 0};
    case Op::all_reduce: return {op.count, op.count};
    case Op::gather: return {op.parts.count(rank), root ? op.parts.total() : 0};
    case Op::all_gather: return {op.parts.count(rank), op.parts.total()};
    case Op::scatter: return {root ? op.parts.total() : 0, op.parts.count(rank)};
    case Op::reduce_scatter: return {op.parts.total(), op.parts.count(rank)};
    case Op::all_to_all: return {op.in_parts.total(), op.out_parts.total()};
    default: return {};
  }
}

bool has_pieces(Op op) { return op == Op::broadcast || op == Op::reduce || op == Op::all_reduce; }

}  // namespace

// ---- Pools ----------------------------------------------------------------------------------------------------------

DevicePools::~DevicePools() {
  for (const auto& [device, events] : events_) {
    for (const auto& event : events) runtime_.free_event(*event);
  }
  for (const auto& [bytes, one] : pinned_) runtime_.free_pinned(one.device, one.memory);
}

std::shared_ptr<const DeviceEvent> DevicePools::event(const std::shared_ptr<DevicePools>& pools, int device) {
  std::unique_ptr<DeviceEvent> event;
  {
    const MutexLock lock(pools->mutex_);
    if (auto& free = pools->events_[device]; !free.empty()) {
      event = std::move(free.back());
      free.pop_back();
    }
  }
  if (!event) event = std::make_unique<DeviceEvent>(pools->runtime_.make_event(device));
  return {event.release(), [pools, device](DeviceEvent* it) {
            std::unique_ptr<DeviceEvent> free(it);
            const MutexLock lock(pools->mutex_);
            pools->events_[device].push_back(std::move(free));
          }};
}

std::shared_ptr<std::byte> DevicePools::pinned(const std::shared_ptr<DevicePools>& pools, int device,
                                               std::size_t bytes) {
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
  Pinned one;
  {
    const MutexLock lock(pools->mutex_);
    if (const auto it = pools->pinned_.find(size); it != pools->pinned_.end()) {
      one = it->second;
      pools->pinned_.erase(it);
    }
  }
  if (one.memory == nullptr) one = {device, pools->runtime_.make_pinned(device, size)};
  return {one.memory, [pools, size, one](std::byte*) {
            const MutexLock lock(pools->mutex_);
            pools->pinned_.emplace(size, one);
          }};
}

// ---- Set-up and end -------------------------------------------------------------------------------------------------

class DeviceCalls::DescriptorsOfGroup final : public DescriptorExchange {
 public:
  explicit DescriptorsOfGroup(detail::GroupImpl& group) : group_(group) {}
  int share(std::string_view topic, int maker, int descriptor, Deadline deadline) override {
    const Topology& topology = group_.facts().topology;
    const auto& local = topology.nodes[static_cast<std::size_t>(topology.node_rank())];
    std::vector<int> members = {topology.members[static_cast<std::size_t>(maker)].global_rank};
    for (const int rank : local) {
      if (rank != maker) members.push_back(topology.members[static_cast<std::size_t>(rank)].global_rank);
    }
    if (members.size() == 1) return -1;
    return group_.facts()
        .session
        ->share_descriptor(fmt::format("{}:device:{}:{}", group_.facts().name, topic, maker), members, descriptor,
                           deadline, group_.abort_signal())
        .release();
  }

 private:
  detail::GroupImpl& group_;
};

class DeviceCalls::AbortOfGroup final : public AbortToken {
 public:
  explicit AbortOfGroup(const AbortSignal& signal) : signal_(signal) {}
  bool aborted() const noexcept override { return signal_.raised(); }

 private:
  const AbortSignal& signal_;
};

DeviceCalls::DeviceCalls(detail::GroupImpl& group, const DevicePluginEntry* entry, int device, Deadline deadline)
    : group_(group), runtime_(device_runtime()), device_(device), pools_(std::make_shared<DevicePools>(runtime_)) {
  if (entry != nullptr) {
    const Topology& topology = group_.facts().topology;
    const int count = runtime_.device_count();
    if (device_ < 0) device_ = topology.local_rank() % std::max(count, 1);
    MANIPLE_REQUIRE(device_ < count, "device {} was requested for rank {}, but this process sees {} GPUs", device_,
                    topology.rank, count);
    descriptors_ = std::make_unique<DescriptorsOfGroup>(group_);
    abort_token_ = std::make_unique<AbortOfGroup>(group_.abort_signal());
    store_ = make_prefix_store("maniple/device/" + group_.facts().name, group_.facts().session->store());
    DeviceContext context;
    context.group = group_.facts().name;
    context.rank = topology.rank;
    for (const auto& member : topology.members) {
      context.global_ranks.push_back(member.global_rank);
      context.nodes.push_back(member.node_rank);
    }
    context.device = device_;
    context.store = store_.get();
    context.descriptors = descriptors_.get();
    context.deadline = deadline;
    context.abort = abort_token_.get();
    context.compare = knob_flag(Knob::checks);
    try {
      engine_ = entry->make(context);
    } catch (...) {
      group_.abort_signal().check();  // throws the first cause instead of its consequence
      throw;
    }
  }
  if (engine_) {
    engine_tells_ = engine_->waits() != DevicePlugin::Waits::unknown;
    const MutexLock lock(watch_->mutex);
    start_watching();  // an abort must reach the engine, even before the first call
  }
  // Notifies under the lock, so that the watching thread cannot miss it between its check and its wait.
  listener_ = std::make_unique<AbortListener>(group_.abort_signal(), [this] {
    const MutexLock lock(watch_->mutex);
    changed_->notify_all();
  });
}

DeviceCalls::~DeviceCalls() {
  listener_.reset();
  {
    const MutexLock lock(watch_->mutex);
    stopping_ = true;
  }
  changed_->notify_all();
  if (watcher_.joinable()) watcher_.join();
  if (!is_idle() && engine_) engine_->abort();
  // Before releasing memory that operations kept, which is not freed either while the device may be using it.
  if (engine_ && !engine_->finish()) {
    log_warning(
        "[{}] rank {} left the group while cuda:{} was still busy with its operations: their memory stays until the "
        "process ends",
        group_.facts().name, group_.rank(), device_);
  }
  for (std::list<Pending>* list : all_pending()) {
    for (Pending& pending : *list) {
      retire(pending, std::make_exception_ptr(Aborted("the group was destroyed with operations under way")));
    }
  }
  engine_.reset();
  for (const auto& [key, stream] : streams_) runtime_.free_stream(stream);
}

// ---- Streams --------------------------------------------------------------------------------------------------------

void DeviceCalls::require_device(Device device, Op op) const {
  MANIPLE_REQUIRE(device.type == DeviceType::cuda, "{}: there is no device {}", to_string(op), to_string(device));
  if (!engine_) return;
  MANIPLE_REQUIRE(device.index == device_,
                  "{}: the memory is on {}, but this rank's part of group {} is on cuda:{}; choose the GPU with "
                  "InitOptions::device, or with `maniple run`",
                  to_string(op), to_string(device), group_.facts().name, device_);
}

DeviceStream DeviceCalls::own_stream(int device, Purpose purpose) {
  const MutexLock lock(streams_mutex_);  // threads may send while another thread calls a collective
  const auto it = streams_.find({device, purpose});
  if (it != streams_.end()) return it->second;
  return streams_[{device, purpose}] = runtime_.make_stream(device);
}

DeviceStream DeviceCalls::stream_for(DeviceStream stream, const CallOptions& call, Purpose purpose) {
  if (!call.async_op) return stream;
  const DeviceStream own = own_stream(stream.device, purpose);
  const auto event = DevicePools::event(pools_, stream.device);
  runtime_.record(*event, stream);
  runtime_.wait(own, *event);
  return own;
}

// A group's operations run in call order, even on different streams. Inside a graph the engine ensures that: an event
// recorded in one capture is not valid in the next.
void DeviceCalls::order_after_last(DeviceStream stream, bool captured) {
  if (last_event_ && last_stream_ != stream && !captured) runtime_.wait(stream, *last_event_);
}

std::shared_ptr<detail::WorkState> DeviceCalls::make_work(DeviceStream stream, bool captured) {
  auto work = std::make_shared<detail::WorkState>();
  work->device = {&runtime_, DevicePools::event(pools_, stream.device), stream, captured, watch_};
  return work;
}

// ---- Collectives ----------------------------------------------------------------------------------------------------

Work DeviceCalls::run(Operation operation, const CallOptions& call) {
  require_device(operation.device, operation.op);
  if (!engine_ || !engine_->can(operation)) return run_staged(std::move(operation), call);
  std::shared_ptr<detail::WorkState> work;
  group_.run_tasks(operation.op, call, [&](OperationContext&) { work = enqueue({&operation, 1}, call); });
  return Work(work);
}

Work DeviceCalls::run_all(std::vector<Operation> operations, const CallOptions& call) {
  if (operations.empty()) return done_work();
  const bool all = engine_ && std::all_of(operations.begin(), operations.end(),
                                          [this](const Operation& op) { return engine_->can(op); });
  for (const Operation& op : operations) require_device(op.device, op.op);
  if (all) {
    std::shared_ptr<detail::WorkState> work;
    group_.run_tasks(operations.front().op, call, [&](OperationContext&) { work = enqueue(operations, call); });
    return Work(work);
  }
  // The operations run in stream order, so the last one finishes after the others.
  Work last;
  for (Operation& op : operations) last = run_staged(std::move(op), call);
  return last;
}

std::shared_ptr<detail::WorkState> DeviceCalls::enqueue(std::span<Operation> operations, const CallOptions& call) {
  const DeviceStream caller{operations.front().device.index, operations.front().stream};
  const bool captured = runtime_.is_capturing(caller);
  if (captured && !engine_->can_capture()) {
    throw Unsupported(fmt::format("{}: {} cannot be captured into a CUDA graph; the backend cuda can",
                                  to_string(operations.front().op), engine_->name()));
  }
  const DeviceStream stream = stream_for(caller, call, Purpose::collectives);
  order_after_last(stream, captured);
  Pending pending;
  pending.work = make_work(stream, captured);
  // A single rank never waits.
  const bool alone = group_.size() == 1;
  pending.limit = alone ? Seconds::max() : group_.limit(call);
  pending.told = engine_tells_ && !alone;
  if (!captured && !alone && !engine_tells_) {
    pending.started = DevicePools::event(pools_, stream.device);
    runtime_.record(*pending.started, stream);
  }
  for (Operation& op : operations) {
    op.stream = stream.handle;
    group_.begin_on_device(op);
  }
  Operation& last = operations.back();
  const std::shared_ptr<const DeviceEvent>& end = pending.work->device.event;
  Enqueueing place = begin_enqueueing(stream);
  try {
    bool recorded = false;
    if (operations.size() == 1) {
      recorded = engine_->enqueue(last, end->handle);
      engine_event_ = end;
    } else {
      engine_->begin_batch();
      for (const Operation& op : operations) engine_->enqueue(op);
      engine_->end_batch(stream.handle);
    }
    if (!recorded) runtime_.record(*end, stream);
  } catch (const SystemError&) {
    await_first_cause();
    group_.end_on_device(last.seq, true);
    group_.fail(last);
  } catch (...) {
    group_.end_on_device(last.seq, true);
    group_.fail(last);
  }
  auto work = pending.work;
  if (captured) {
    group_.end_on_device(last.seq, false);
    work->finish(nullptr);
    return work;
  }
  last_event_ = work->device.event;
  last_stream_ = stream;
  pending.context = group_.context_of(to_string(last.op), last.seq);
  pending.recorded = true;
  watch(std::move(pending), std::move(place));
  return work;
}

Work DeviceCalls::run_staged(Operation op, const CallOptions& call) {
  const DeviceStream caller{op.device.index, op.stream};
  if (runtime_.is_capturing(caller)) {
    throw Unsupported(
        fmt::format("{}: backend {} sends GPU memory through host memory, which cannot be captured into a "
                    "CUDA graph; the backends cuda and nccl can",
                    to_string(op.op), group_.facts().backend));
  }
  group_.require_usable(op.op, call);
  const Extent extent = extent_of(op, group_.rank());
  const std::size_t element = op.element();
  const std::size_t in_bytes = extent.in * element, out_bytes = extent.out * element;
  // In place on the host if it is in place on the device; broadcast has one buffer.
  const bool in_place = op.op == Op::broadcast || (op.in == op.out && op.op == Op::all_reduce);
  const std::size_t out_at = in_place ? 0 : round_up(in_bytes);

  struct Piece {
    Operation operation;
    std::shared_ptr<const DeviceEvent> copied;
    std::uint32_t* word;
  };
  auto pieces = std::make_shared<std::vector<Piece>>();
  const std::size_t per_piece = has_pieces(op.op) ? std::max<std::size_t>(kPiece / element, 1) : 0;
  const std::size_t count = has_pieces(op.op) && op.count > per_piece ? (op.count + per_piece - 1) / per_piece : 1;
  const std::size_t memory_bytes = out_at + std::max(out_bytes, in_place ? in_bytes : 0);
  const auto memory = DevicePools::pinned(pools_, caller.device, round_up(memory_bytes) + count * kWordStride);
  std::byte* const words = memory.get() + round_up(memory_bytes);

  const DeviceStream stream = stream_for(caller, call, Purpose::collectives);
  order_after_last(stream, false);
  for (std::size_t i = 0; i < count; ++i) {
    Piece piece{op, DevicePools::event(pools_, stream.device),
                reinterpret_cast<std::uint32_t*>(words + i * kWordStride)};
    std::atomic_ref<std::uint32_t>(*piece.word).store(0, std::memory_order_relaxed);
    const std::size_t first = i * per_piece;
    Operation& host = piece.operation;
    host.device = {};
    host.stream = nullptr;
    host.in = memory.get() + first * element;
    host.out = memory.get() + out_at + first * element;
    if (count > 1) host.count = std::min(per_piece, op.count - first);
    const std::size_t bytes = count > 1 ? (in_bytes == 0 ? 0 : host.count * element) : in_bytes;
    if (bytes != 0) runtime_.copy(const_cast<std::byte*>(host.in), op.in + first * element, bytes, stream);
    runtime_.record(*piece.copied, stream);
    pieces->push_back(std::move(piece));
  }
  for (const Piece& piece : *pieces) {
    runtime_.wait_for_bits(stream, piece.word, 1);
    const std::size_t first = static_cast<std::size_t>(piece.operation.out - memory.get()) - out_at;
    const std::size_t bytes = count > 1 ? (out_bytes == 0 ? 0 : piece.operation.count * element) : out_bytes;
    if (bytes != 0) runtime_.copy(op.out + first, piece.operation.out, bytes, stream);
  }
  Pending pending;
  pending.work = make_work(stream, false);
  Enqueueing place = begin_enqueueing(stream);
  runtime_.record(*pending.work->device.event, stream);
  last_event_ = pending.work->device.event;
  last_stream_ = stream;
  pending.context = group_.context_of(to_string(op.op));
  pending.limit = Seconds::max();  // the host part enforces the limit
  pending.host = std::make_shared<HostPart>();
  pending.keep = {memory};
  auto work = pending.work;

  // The deadline starts once the stream has reached the operation: earlier work in the stream may take long.
  CallOptions host_call = call;
  host_call.async_op = true;
  const Seconds limit = group_.limit(call);
  const auto host_part = pending.host;
  watch(std::move(pending), std::move(place));
  const auto release = [pieces, memory, host_part](const std::exception_ptr& error) {
    host_part->end(error);
    for (const Piece& piece : *pieces) set_word(piece.word);
  };
  try {
    const Work host = group_.start_tasks(
        op.op, host_call,
        [this, pieces, limit](OperationContext&) {
          for (Piece& piece : *pieces) {
            while (!runtime_.reached(*piece.copied)) {
              group_.abort_signal().check();
              const timespec pause{0, 20'000};
              ::nanosleep(&pause, nullptr);  // sleep: device events can only be polled
            }
            OperationContext context(limit);
            group_.execute(piece.operation, context);
            set_word(piece.word);
          }
        },
        /*seen=*/false);
    when_done(host, release);
  } catch (...) {
    release(std::current_exception());  // the stream must not wait for an operation that never runs
    throw;
  }
  return Work(work);
}

Work DeviceCalls::mark(Device device, void* handle, std::shared_ptr<void> keep) {
  const DeviceStream stream{device.index, handle};
  const bool captured = runtime_.is_capturing(stream);
  Pending pending;
  pending.work = make_work(stream, captured);
  Enqueueing place = begin_enqueueing(stream);
  runtime_.record(*pending.work->device.event, stream);
  pending.limit = Seconds::max();  // the operations before it have limits
  pending.context = group_.context_of("copy");
  pending.keep = {std::move(keep)};
  auto work = pending.work;
  if (captured) {
    work->finish(nullptr);
  } else {
    watch(std::move(pending), std::move(place));
  }
  return Work(work);
}

}  // namespace maniple
