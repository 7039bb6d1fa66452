// send, recv and their asynchronous forms.

#include <fmt/format.h>

#include "base/check.h"
#include "group/group_impl.h"
#include "group/validate.h"

namespace maniple {

std::shared_ptr<Message> ProcessGroup::Impl::make_message(const PointToPoint& p2p, const Call& call) const {
  const bool sends = p2p.op == Op::send;
  MANIPLE_REQUIRE(sends || p2p.op == Op::recv, "a batch holds send and recv, not {}", to_string(p2p.op));
  MANIPLE_REQUIRE((p2p.peer >= 0 && p2p.peer < size()) || (!sends && p2p.peer == kAnySource),
                  "{}: peer {} in a group of {} ranks", to_string(p2p.op), p2p.peer, size());
  const ConstBuffer buffer = sends ? p2p.out : ConstBuffer(p2p.in);
  require_memory(p2p.op, "buffer", buffer);
  MANIPLE_REQUIRE(p2p.tag >= 0, "{}: tag {}; tags are 0 or more", to_string(p2p.op), p2p.tag);
  auto message = std::make_shared<Message>();
  message->op = p2p.op;
  message->peer = p2p.peer;
  message->tag = p2p.tag;
  message->dtype = buffer.dtype;
  message->bytes = buffer.bytes();
  // Messages that are sent are only read from; one pointer type serves both.
  message->data = static_cast<std::byte*>(const_cast<void*>(buffer.data));
  message->deadline = Deadline::after(limit(call));
  // Reading the clock once is enough.
  message->since = message->deadline.is_never()
                       ? Deadline::Clock::now()
                       : message->deadline.when() - std::chrono::duration_cast<Deadline::Duration>(limit(call));
  return message;
}

namespace {

template <class Call>  // PointToPoint or Message
std::string name_of(const Call& p2p, const GroupFacts& facts) {
  const std::string peer = p2p.peer == kAnySource ? "anyone" : fmt::format("rank {}", p2p.peer);
  return fmt::format("[{} {} {} tag {} {} rank {}/{}] ", to_string(p2p.op), p2p.op == Op::send ? "to" : "from", peer, p2p.tag,
                     facts.name, facts.topology.rank, facts.topology.size());
}

}  // namespace

MessageWait ProcessGroup::Impl::oldest_message() const {
  const AwaitedMessages awaited = backend_->awaited();
  if (!awaited.oldest) return {};
  const Message& message = *awaited.oldest;
  MessageWait wait{message.since, name_of(message, facts_), "anyone"};
  wait.call.pop_back();  // the blank
  if (message.peer != kAnySource) {
    const auto& peer = facts_.topology.members[static_cast<std::size_t>(message.peer)];
    wait.whom = fmt::format("rank {} (pid {} on {})", message.peer, peer.pid, peer.host);
  }
  if (awaited.more > 0) wait.whom += fmt::format("; {} more messages are waited for", awaited.more);
  return wait;
}

// A lost peer, a deadline or a disagreement in a message ends the group, like any other failure.
int ProcessGroup::Impl::run_message(const PointToPoint& p2p, const Call& call) {
  require_usable(p2p.op, call);
  auto message = make_message(p2p, call);
  backend_->start({&message, 1}, false);
  backend_->drive(*message);
  if (message->error) {
    const std::string who = name_of(p2p, facts_);
    const auto named = with_prefix(who, settle(message->error, 0, who));
    told_.store(true);
    std::rethrow_exception(named);
  }
  return message->source;
}

std::vector<Work> ProcessGroup::Impl::start_messages(std::span<const PointToPoint> operations, int* source, const Call& call) {
  if (!operations.empty()) require_usable(operations.front().op, call);
  std::vector<std::shared_ptr<Message>> messages;
  std::vector<Work> works;
  for (const PointToPoint& p2p : operations) messages.push_back(make_message(p2p, call));  // all are checked before any starts
  for (std::size_t i = 0; i < messages.size(); ++i) {
    auto state = std::make_shared<Work::State>();
    messages[i]->finished = [this, state, source, message = messages[i].get(), p2p = operations[i]] {
      std::exception_ptr error = message->error;
      if (error) {
        const std::string who = name_of(p2p, facts_);
        error = with_prefix(who, settle(error, 0, who));
        told_.store(true);
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

void ProcessGroup::send(ConstBuffer buffer, int peer, int tag, Call call) {
  if (impl_->takes_part("send")) impl_->run_message(PointToPoint::send(buffer, peer, tag), call);
}

Work ProcessGroup::isend(ConstBuffer buffer, int peer, int tag, Call call) {
  if (!impl_->takes_part("isend")) return done_work();
  const PointToPoint p2p = PointToPoint::send(buffer, peer, tag);
  return impl_->start_messages({&p2p, 1}, nullptr, call).front();
}

int ProcessGroup::recv(Buffer buffer, int peer, int tag, Call call) {
  return impl_->takes_part("recv") ? impl_->run_message(PointToPoint::recv(buffer, peer, tag), call) : -1;
}

Work ProcessGroup::irecv(Buffer buffer, int peer, int tag, int* source, Call call) {
  if (!impl_->takes_part("irecv")) {
    if (source != nullptr) *source = -1;
    return done_work();
  }
  const PointToPoint p2p = PointToPoint::recv(buffer, peer, tag);
  return impl_->start_messages({&p2p, 1}, source, call).front();
}

std::vector<Work> ProcessGroup::batch_isend_irecv(std::span<const PointToPoint> operations, Call call) {
  if (!impl_->takes_part("batch_isend_irecv")) return std::vector<Work>(operations.size(), done_work());
  return impl_->start_messages(operations, nullptr, call);
}

}  // namespace maniple
