// Messages from and to device memory: by the engine if it has messages, otherwise through host memory.
#include "comm/group/device_calls.h"

#include <atomic>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/error_codec.h"
#include "comm/group/group_impl.h"

namespace maniple {
std::vector<Work> DeviceCalls::start_messages(std::span<const PointToPoint> operations, int* source,
                                              const CallOptions& call) {
  if (operations.empty()) return {};
  group_.require_usable(operations.front().op, call);
  for (const PointToPoint& p2p : operations) {
    const Device device = p2p.op == Op::send ? p2p.out.device : p2p.in.device;
    MANIPLE_REQUIRE(!device.is_cpu(), "{}: a batch mixes host and GPU memory; start one batch for each",
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
    const DeviceStream caller{device.index, call.stream};
    const bool captured = runtime_.is_capturing(caller);
    const DeviceStream stream = stream_for(caller, call, Purpose::collectives);
    order_after_last(stream, captured);
    Pending pending;
    pending.work = make_work(stream, captured);
    pending.limit = group_.limit(call);
    pending.started = captured ? nullptr : DevicePools::event(pools_, device.index);
    pending.context = group_.context_of(*checked.front());
    if (!captured) runtime_.record(*pending.started, stream);
    Enqueueing place = begin_enqueueing(stream);
    try {
      engine_->enqueue_messages(messages, stream.handle);
      runtime_.record(*pending.work->device.event, stream);
    } catch (...) {
      std::rethrow_exception(
          group_.failure(group_.propagate(std::current_exception(), pending.context), pending.context));
    }
    if (source != nullptr) *source = messages.front().peer;
    works.assign(operations.size(), Work(pending.work));
    if (captured) return pending.work->finish(nullptr);
    last_event_ = pending.work->device.event;
    last_stream_ = stream;
    watch(std::move(pending), std::move(place));
  });
  return works;
}

std::vector<Work> DeviceCalls::stage_messages(std::span<const PointToPoint> operations, int* source,
                                              const CallOptions& call) {
  for (const PointToPoint& p2p : operations) {
    const Device device = p2p.op == Op::send ? p2p.out.device : p2p.in.device;
    if (!runtime_.is_capturing({device.index, call.stream})) continue;
    throw Unsupported(fmt::format("{}: messages that go through host memory cannot be captured into a CUDA graph",
                                  to_string(p2p.op)));
  }
  StagedMessages staged;
  staged.limit = group_.limit(call);
  std::vector<Work> works(operations.size());
  std::vector<std::shared_ptr<HostPart>> sends;
  for (const PointToPoint& p2p : operations) staged.messages.push_back(group_.make_message(p2p, call));
  // Copies all data to send before the stream waits for any receive.
  for (const bool is_send : {true, false}) {
    for (std::size_t i = 0; i < operations.size(); ++i) {
      if ((operations[i].op == Op::send) != is_send) continue;
      Message& message = *staged.messages[i];
      const Device device = is_send ? operations[i].out.device : operations[i].in.device;
      const auto memory = DevicePools::pinned(pools_, device.index, kWordStride + message.bytes);
      auto* const word = reinterpret_cast<std::uint32_t*>(memory.get());
      std::atomic_ref<std::uint32_t>(*word).store(0, std::memory_order_relaxed);
      std::byte* const on_device = message.data;
      message.data = memory.get() + kWordStride;
      const DeviceStream stream =
          stream_for({device.index, call.stream}, call, is_send ? Purpose::sends : Purpose::receives);
      Pending pending;
      pending.host = std::make_shared<HostPart>();
      pending.work = make_work(stream, false);
      pending.limit = Seconds::max();
      pending.context = group_.context_of(message);
      pending.keep = {memory};
      message.waiters = std::shared_ptr<const std::atomic<int>>(pending.work, &pending.work->waiters);
      message.finished = [group = &group_, raw = &message, memory, word, source, part = pending.host] {
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
      works[i] = Work(pending.work);
      DeviceEnd& end = pending.work->device;
      if (is_send) {
        if (message.bytes != 0) runtime_.copy(message.data, on_device, message.bytes, stream);
        staged.copied.push_back(DevicePools::event(pools_, device.index));
        runtime_.record(*staged.copied.back(), stream);
        sends.push_back(pending.host);
        Enqueueing place = begin_enqueueing(stream);
        runtime_.record(*end.event, stream);
        watch(std::move(pending), std::move(place));
      } else {
        const auto posted = DevicePools::event(pools_, device.index);
        runtime_.record(*posted, stream);
        end.arrival = std::make_shared<DeviceArrival>(
            DeviceArrival::Copy{&runtime_, on_device, memory, message.data, message.bytes, word, posted, end.event});
        if (!call.async_op) end.arrival->enqueue(stream);
        watch_arrival(std::move(pending));
      }
    }
  }
  {
    const MutexLock lock(watch_->mutex);
    is_sending();  // forgets sends that have arrived
    sends_.insert(sends_.end(), sends.begin(), sends.end());
    staged_messages_.push_back(std::move(staged));
  }
  changed_->notify_all();
  return works;
}

bool DeviceCalls::is_sending() {
  std::erase_if(sends_, [](const std::shared_ptr<HostPart>& part) { return part->ended.load(); });
  return !sends_.empty();
}

}  // namespace maniple
