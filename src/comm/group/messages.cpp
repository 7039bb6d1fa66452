// send, recv and their asynchronous forms.

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/group/group_impl.h"
#include "comm/group/validate.h"

namespace maniple {
void detail::GroupImpl::describe_message(const PointToPoint& p2p, Message& message) const {
  const bool sends = p2p.op == Op::send;
  MANIPLE_REQUIRE(sends || p2p.op == Op::recv, "a batch holds send and recv, not {}", to_string(p2p.op));
  MANIPLE_REQUIRE((p2p.peer >= 0 && p2p.peer < size()) || (!sends && p2p.peer == kAnySource),
                  "{}: peer {} in a group of {} ranks", to_string(p2p.op), p2p.peer, size());
  const ConstBuffer buffer = sends ? p2p.out : ConstBuffer(p2p.in);
  require_memory(p2p.op, "buffer", buffer);
  MANIPLE_REQUIRE(p2p.tag >= 0, "{}: tag {}; tags are 0 or more", to_string(p2p.op), p2p.tag);
  message.op = p2p.op;
  message.peer = p2p.peer;
  message.tag = p2p.tag;
  message.dtype = buffer.dtype;
  message.bytes = buffer.bytes();
  // One pointer type serves both directions; a send only reads.
  message.data = static_cast<std::byte*>(const_cast<void*>(buffer.data));
}

std::shared_ptr<Message> detail::GroupImpl::make_message(const PointToPoint& p2p, const CallOptions& call) const {
  auto message = std::make_shared<Message>();
  describe_message(p2p, *message);
  message->deadline = Deadline::after(limit(call));
  // Derived from the deadline to read the clock only once.
  message->since = message->deadline.is_never()
                       ? Deadline::Clock::now()
                       : message->deadline.when() - std::chrono::duration_cast<Deadline::Duration>(limit(call));
  return message;
}

ErrorInfo detail::GroupImpl::context_of(const Message& message) const {
  const std::string peer = message.peer == kAnySource ? "any rank" : fmt::format("rank {}", message.peer);
  return context_of(to_string(message.op), 0,
                    fmt::format("{} {} tag {}", message.op == Op::send ? "to" : "from", peer, message.tag));
}

MessageWait detail::GroupImpl::oldest_message() const {
  const AwaitedMessages awaited = backend_->awaited();
  if (!awaited.oldest) return {};
  const Message& message = *awaited.oldest;
  MessageWait wait{message.since, describe(context_of(message)), "any rank"};
  wait.call.pop_back();  // the space before a reason
  if (message.peer != kAnySource) {
    const auto& peer = facts_.topology.members[message.peer];
    wait.whom = fmt::format("rank {} (pid {} on {})", message.peer, peer.pid, peer.host);
  }
  if (awaited.more > 0) wait.whom += fmt::format("; {} more messages are waited for", awaited.more);
  return wait;
}

// A lost peer, an expired deadline or a mismatch in a message fails the group, like any other failure.
int detail::GroupImpl::run_message(const PointToPoint& p2p, const CallOptions& call) {
  require_usable(p2p.op, call.where);
  if (!device_of(p2p).is_cpu()) [[unlikely]] {
    if (p2p.peer != kAnySource) {
      enqueue_messages({&p2p, 1}, nullptr, call);
      return p2p.peer;
    }
    int source = kAnySource;
    enqueue_messages({&p2p, 1}, &source, call).front().synchronize();  // sets `source`
    return source;
  }
  Message quick;
  describe_message(p2p, quick);
  if (backend_->try_now(quick)) return quick.source;
  auto message = make_message(p2p, call);
  backend_->start({&message, 1}, false);
  backend_->drive(*message);
  if (message->error) {
    const ErrorInfo context = context_of(*message);
    std::rethrow_exception(failure(propagate(message->error, context), context));
  }
  return message->source;
}

std::vector<Work> detail::GroupImpl::start_messages(std::span<const PointToPoint> operations, int* source,
                                                    const CallOptions& call) {
  if (!operations.empty()) require_usable(operations.front().op, call.where);
  if (!operations.empty() && !device_of(operations.front()).is_cpu()) [[unlikely]] {
    CallOptions on_device = call;
    on_device.async_op = true;
    return enqueue_messages(operations, source, on_device);
  }
  std::vector<std::shared_ptr<Message>> messages;
  std::vector<Work> works;
  for (const PointToPoint& p2p : operations)
    messages.push_back(make_message(p2p, call));  // checks all before any starts
  for (std::size_t i = 0; i < messages.size(); ++i) {
    auto state = std::make_shared<detail::WorkState>();
    messages[i]->finished = [this, state, source, message = messages[i].get()] {
      std::exception_ptr error = message->error;
      if (error) {
        const ErrorInfo context = context_of(*message);
        error = failure(propagate(error, context), context);
      } else if (source != nullptr) {
        *source = message->source;
      }
      state->finish(std::move(error));
    };
    messages[i]->waiters = std::shared_ptr<const std::atomic<int>>(state, &state->waiters);
    works.emplace_back(state);
  }
  backend_->start(messages, true);
  return works;
}

void ProcessGroup::send(ConstBuffer buffer, int peer, int tag, const CallOptions& options,
                        const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (impl_->takes_part("send")) impl_->run_message(PointToPoint::send(buffer, peer, tag), call);
}

Work ProcessGroup::isend(ConstBuffer buffer, int peer, int tag, const CallOptions& options,
                         const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("isend")) return done_work();
  const PointToPoint p2p = PointToPoint::send(buffer, peer, tag);
  return impl_->start_messages({&p2p, 1}, nullptr, call).front();
}

int ProcessGroup::recv(Buffer buffer, int peer, int tag, const CallOptions& options, const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  return impl_->takes_part("recv") ? impl_->run_message(PointToPoint::recv(buffer, peer, tag), call) : -1;
}

Work ProcessGroup::irecv(Buffer buffer, int peer, int tag, int* source, const CallOptions& options,
                         const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("irecv")) {
    if (source != nullptr) *source = -1;
    return done_work();
  }
  const PointToPoint p2p = PointToPoint::recv(buffer, peer, tag);
  return impl_->start_messages({&p2p, 1}, source, call).front();
}

std::vector<Work> ProcessGroup::batch_isend_irecv(std::span<const PointToPoint> operations, const CallOptions& options,
                                                  const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("batch_isend_irecv")) return std::vector<Work>(operations.size(), done_work());
  std::vector<UsedMemory> extents;
  for (const PointToPoint& p2p : operations) {
    const bool sends = p2p.op == Op::send;
    extents.push_back({sends ? p2p.out.data : p2p.in.data, sends ? p2p.out.bytes() : p2p.in.bytes(), !sends});
  }
  require_apart("batch_isend_irecv", std::move(extents));
  return impl_->start_messages(operations, nullptr, call);
}

}  // namespace maniple
