// Messages from and to memory of a device: by the engine where it has messages, otherwise through host memory.
#include "group/device_calls.h"

#include <atomic>

#include <fmt/format.h>

#include "base/check.h"
#include "group/group_impl.h"

namespace maniple {
std::vector<Work> DeviceCalls::start_messages(std::span<const PointToPoint> operations, int* source,
                                              const CallOptions& call) {
  if (operations.empty()) return {};
  group_.require_usable(operations.front().op, call);
  for (const PointToPoint& p2p : operations) {
    const Device device = p2p.op == Op::send ? p2p.out.device : p2p.in.device;
    MANIPLE_REQUIRE(!device.is_cpu(), "{}: a batch has memory of the host and of a GPU; start one batch for each",
                    to_string(p2p.op));
    require_device(device, p2p.op);
  }
  return engine_ && engine_->has_messages() && !by_tags_ ? enqueue_messages(operations, source, call)
                                                         : stage_messages(operations, source, call);
}

std::vector<Work> DeviceCalls::enqueue_messages(std::span<const PointToPoint> operations, int* source,
                                                const CallOptions& call) {
  std::vector<DeviceMessage> messages;
  std::vector<std::shared_ptr<Message>> checked;
  for (const PointToPoint& p2p : operations) {
    checked.push_back(group_.make_message(p2p, call));  // checks the arguments
    if (p2p.peer == kAnySource) {
      throw Unsupported(fmt::format("recv: {} cannot receive from any rank; name the sender", engine_->name()));
    }
    const Message& message = *checked.back();
    messages.push_back({p2p.op == Op::send, message.data, message.bytes, message.peer, message.tag});
  }
  const Device device =
      operations.front().op == Op::send ? operations.front().out.device : operations.front().in.device;
  std::vector<Work> works;
  group_.run_tasks(operations.front().op, call, [&](OperationContext&) {
    const bool captured = runtime_.is_capturing(call.stream);
    void* const stream = stream_for(device, call.stream, call, Purpose::collectives);
    order_after_last(stream, captured);
    Pending pending;
    pending.work = make_work(device.index, stream, captured);
    pending.limit = group_.limit(call);
    pending.started = captured ? nullptr : DevicePools::event(pools_, device.index);
    pending.context = group_.context_of(*checked.front());
    if (!captured) runtime_.record(pending.started.get(), stream);
    pending.before = ++stamp_;
    try {
      engine_->enqueue_messages(messages, stream);
      runtime_.record(pending.work->device.event.get(), stream);
    } catch (...) {
      std::rethrow_exception(
          group_.failure(group_.propagate(std::current_exception(), pending.context), pending.context));
    }
    if (source != nullptr) *source = messages.front().peer;
    works.assign(operations.size(), Work(pending.work));
    if (captured) return pending.work->finish(nullptr);
    last_event_ = pending.work->device.event;
    last_stream_ = stream;
    watch(std::move(pending));
  });
  return works;
}

std::vector<Work> DeviceCalls::stage_messages(std::span<const PointToPoint> operations, int* source,
                                              const CallOptions& call) {
  if (runtime_.is_capturing(call.stream)) {
    throw Unsupported(
        fmt::format("{}: messages that go through memory of the host cannot be captured into a CUDA graph",
                    to_string(operations.front().op)));
  }
  StagedMessages staged;
  staged.limit = group_.limit(call);
  std::vector<Work> works;
  std::vector<Pending> pending(operations.size());
  for (const PointToPoint& p2p : operations) staged.messages.push_back(group_.make_message(p2p, call));
  // All that is sent is copied before anything is waited for.
  for (const bool sends : {true, false}) {
    for (std::size_t i = 0; i < operations.size(); ++i) {
      if ((operations[i].op == Op::send) != sends) continue;
      Message& message = *staged.messages[i];
      const Device device = sends ? operations[i].out.device : operations[i].in.device;
      const auto memory = DevicePools::pinned(pools_, kWordStride + message.bytes);
      auto* const word = reinterpret_cast<std::uint32_t*>(memory.get());
      std::atomic_ref<std::uint32_t>(*word).store(0, std::memory_order_relaxed);
      std::byte* const on_device = message.data;
      message.data = memory.get() + kWordStride;
      void* const stream = stream_for(device, call.stream, call, sends ? Purpose::sends : Purpose::receives);
      pending[i].host = std::make_shared<HostPart>();
      pending[i].work = make_work(device.index, stream, false);
      DeviceEnd& end = pending[i].work->device;
      if (sends) {
        if (message.bytes != 0) runtime_.copy(message.data, on_device, message.bytes, stream);
        staged.copied = DevicePools::event(pools_, device.index);
        runtime_.record(staged.copied.get(), stream);
        pending[i].before = ++stamp_;
        runtime_.record(end.event.get(), stream);
      } else {
        const auto posted = DevicePools::event(pools_, device.index);
        runtime_.record(posted.get(), stream);
        end.arrival = std::make_shared<DeviceArrival>(
            DeviceArrival::Copy{&runtime_, on_device, memory, message.data, message.bytes, word, posted, end.event});
        if (!call.async_op) end.arrival->enqueue(stream);
      }
      pending[i].limit = Seconds::max();
      pending[i].context = group_.context_of(message);
      pending[i].keep = {memory};
      message.waiters = std::shared_ptr<const std::atomic<int>>(pending[i].work, &pending[i].work->waiters);
      message.finished = [group = &group_, raw = &message, memory, word, source, part = pending[i].host] {
        std::exception_ptr error;
        if (raw->error) {
          const ErrorInfo context = group->context_of(*raw);
          error = with_context(context, group->propagate(raw->error, context));
        } else if (source != nullptr) {
          *source = raw->source;
        }
        part->end(error);
        set_word(word);
      };
    }
  }
  {
    const std::lock_guard lock(mutex_);
    is_sending();  // forgets those that have arrived
    for (std::size_t i = 0; i < operations.size(); ++i) {
      if (operations[i].op == Op::send) sends_.push_back(pending[i].host);
    }
  }
  for (Pending& one : pending) {
    works.emplace_back(one.work);
    watch(std::move(one));
  }
  {
    const std::lock_guard lock(mutex_);
    staged_messages_.push_back(std::move(staged));
  }
  changed_.notify_all();
  return works;
}

bool DeviceCalls::is_sending() {
  std::erase_if(sends_, [](const std::shared_ptr<HostPart>& part) { return part->ended.load(); });
  return !sends_.empty();
}

}  // namespace maniple
