// The group's operations on device memory: the group orders, numbers and records them, and handles their failure; a
// backend enqueues them.
#include <fmt/format.h>

#include "comm/backend/device/device_streams.h"
#include "comm/backend/plugin/load.h"
#include "comm/base/check.h"
#include "comm/base/error_codec.h"
#include "comm/group/group_impl.h"
#include "comm/group/validate.h"

namespace maniple {

class detail::GroupImpl::DeviceObserver final : public StreamObserver {
 public:
  explicit DeviceObserver(GroupImpl& group) : group_(group) {}
  void ended(std::uint64_t seq, bool failed) noexcept override { group_.recorder_->end(seq, failed); }
  std::exception_ptr failed(const std::exception_ptr& error, const ErrorInfo& context) override {
    const std::exception_ptr cause = group_.propagate(error, context);
    group_.keep_unseen(with_context(context, cause));
    return cause;
  }
  int left_before(std::uint64_t seq) const override { return group_.left_before(seq); }
  void compare_calls(std::uint64_t seq) override { group_.facts_.session->compare_calls(group_.facts_.name, seq); }

 private:
  GroupImpl& group_;
};

struct detail::GroupImpl::Devices {
  explicit Devices(GroupImpl& group) : observer(group) {
    StreamWatcher::Options options;
    options.runtime = &device_runtime();
    options.abort = group.abort_.get();
    options.observer = &observer;
    options.context = group.context_of("");
    for (const auto& member : group.facts_.topology.members) options.global_ranks.push_back(member.global_rank);
    streams = std::make_shared<DeviceStreams>(std::move(options));
  }
  DeviceObserver observer;
  std::shared_ptr<DeviceStreams> streams;
  std::vector<std::unique_ptr<Backend>> backends;  // best first; the last one serves all operations
};

void detail::GroupImpl::make_engine(const BackendEntry& engine, BackendContext context) {
  auto made = std::make_shared<Devices>(*this);
  context.device = facts_.device;
  context.streams = made->streams;
  made->backends.push_back(engine.make(context));
  const MutexLock lock(device_mutex_);
  devices_ = std::move(made);
}

detail::GroupImpl::Devices& detail::GroupImpl::devices() {
  const MutexLock lock(device_mutex_);
  if (!devices_) devices_ = std::make_shared<Devices>(*this);
  Devices& all = *devices_;
  if (all.backends.empty() || all.backends.back()->takes_turns())
    all.backends.push_back(make_staged_backend(*backend_, all.streams, *abort_, rank(), facts_.backend));
  return all;
}

Backend& detail::GroupImpl::backend_for(Device device) {
  if (device.is_cpu()) return *backend_;
  return *devices().backends.front();
}

int detail::GroupImpl::device() { return devices().streams->device(); }

Work detail::GroupImpl::mark(Device device, void* stream, std::shared_ptr<void> keep) {
  return devices().streams->mark({device.index, stream}, std::move(keep));
}

// ---- Collectives ----------------------------------------------------------------------------------------------------

Work detail::GroupImpl::enqueue(std::span<Operation> operations, const CallOptions& call) {
  Devices& all = devices();
  for (const Operation& op : operations) all.streams->require_device(op.device, op.op);
  Backend& backend = choose_backend(all.backends, operations);
  const StreamCall stream_call{.limit = limit(call), .async_op = call.async_op, .begin = [this](Operation& op) {
                                 op.seq = ++seq_;
                                 op.ranks = size();
                                 recorder_->begin(op);
                               }};
  Work work;
  if (!backend.takes_turns()) {
    // The operations run in stream order, so the last one ends after the others.
    for (Operation& op : operations) work = enqueue_in_parts(backend, op, stream_call, call);
    return work;
  }
  run_tasks(operations.front().op, call, [&](OperationContext&) {
    try {
      work = backend.enqueue(operations, stream_call).work;
    } catch (...) {
      const Operation& last = operations.back();
      if (last.seq == 0) throw;  // refused before it was numbered: the group remains usable
      recorder_->end(last.seq, true);
      fail(last);
    }
  });
  return work;
}

Work detail::GroupImpl::enqueue_in_parts(Backend& backend, Operation& op, const StreamCall& stream_call,
                                         const CallOptions& call) {
  require_usable(op.op, call.where);
  Enqueued enqueued = backend.enqueue({&op, 1}, stream_call);
  const std::shared_ptr<HostPart> host = enqueued.host;
  CallOptions host_call = call;
  host_call.async_op = true;
  try {
    // The deadline starts once the stream has reached the operation: earlier work in the stream may take long.
    const Work ended = start_tasks(
        op.op, host_call,
        [this, host, limit = stream_call.limit](OperationContext&) {
          host->run([this, limit](Operation& piece) {
            OperationContext context(limit);
            execute(piece, context);
          });
        },
        /*seen=*/false);
    when_done(ended, [host](const std::exception_ptr& error) { host->end(error); });
  } catch (...) {
    host->end(std::current_exception());  // the stream must not wait for an operation that never runs
    throw;
  }
  return enqueued.work;
}

// ---- Messages -------------------------------------------------------------------------------------------------------

std::vector<Work> detail::GroupImpl::enqueue_messages(std::span<const PointToPoint> operations, int* source,
                                                      const CallOptions& call) {
  if (operations.empty()) return {};
  require_usable(operations.front().op, call.where);
  Devices& all = devices();
  for (const PointToPoint& p2p : operations) {
    MANIPLE_REQUIRE(!device_of(p2p).is_cpu(), "{}: a batch mixes host and GPU memory; start one batch for each",
                    to_string(p2p.op));
    all.streams->require_device(device_of(p2p), p2p.op);
  }
  Backend& backend = all.backends.front()->has_messages(by_tags_) ? *all.backends.front() : *all.backends.back();
  std::vector<StreamMessage> messages;
  for (const PointToPoint& p2p : operations) {
    auto message = make_message(p2p, call);  // checks the arguments
    if (p2p.peer == kAnySource && backend.takes_turns()) {
      throw Unsupported(fmt::format("recv: {} cannot receive from any rank; name the sender", backend.transport()));
    }
    message->finished = [this, source, raw = message.get()] {
      if (raw->error) {
        const ErrorInfo context = context_of(*raw);
        raw->error = with_context(context, propagate(raw->error, context));
      } else if (source != nullptr) {
        *source = raw->source;
      }
    };
    ErrorInfo context = context_of(*message);
    messages.push_back({std::move(message), device_of(p2p), std::move(context)});
  }
  const StreamCall stream_call{.limit = limit(call), .async_op = call.async_op, .stream = call.stream, .begin = {}};
  if (!backend.takes_turns()) return backend.enqueue_messages(messages, stream_call);
  std::vector<Work> works;
  run_tasks(operations.front().op, call, [&](OperationContext&) {
    try {
      works = backend.enqueue_messages(messages, stream_call);
    } catch (...) {
      const ErrorInfo& context = messages.front().context;
      std::rethrow_exception(failure(propagate(std::current_exception(), context), context));
    }
    if (source != nullptr) *source = operations.front().peer;
  });
  return works;
}

// ---- End ------------------------------------------------------------------------------------------------------------

void detail::GroupImpl::drain_devices() {
  std::shared_ptr<Devices> all;
  {
    const MutexLock lock(device_mutex_);
    all = devices_;
  }
  if (!all) return;
  const auto left = [this](std::int64_t more) {  // number of ranks without enqueued work
    try {
      return store_->add("left", more);
    } catch (const Error&) {
      return std::int64_t{size()};  // the store is gone
    }
  };
  const bool drained = all->streams->watcher().drain([&] { return left(0) >= size() - 1; });
  if (drained && size() > 1 && !abort_->raised()) left(1);
}

}  // namespace maniple
