#include "comm/store/store_service.h"

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/codec.h"

namespace maniple {
namespace {

// Smaller values are copied into one piece, for fewer, larger writes.
constexpr std::size_t kSharedFrom = 16 * 1024;

Value piece(std::string bytes) { return std::make_shared<const std::string>(std::move(bytes)); }

std::string encode_number(std::int64_t number) {
  ByteWriter writer;
  writer.put(number);
  return writer.take();
}

std::size_t bytes_of(const std::vector<std::string>& keys) {
  std::size_t bytes = 0;
  for (const std::string& key : keys) bytes += sizeof(key) + key.size();
  return bytes;
}

}  // namespace

void StoreService::handle(Client client, Frame frame) {
  const std::uint32_t id = frame.id;
  try {
    serve(client, decode_request(std::move(frame)));
  } catch (const InvalidArgument& error) {
    reply(client, id, error.what(), StoreStatus::invalid);
  }
}

void StoreService::serve(Client client, StoreRequest request) {
  switch (request.op) {
    case StoreOp::set:
      table_.set(request.key, piece(std::move(request.value)));
      reply(client, request.id, {});
      return wake(request.key);
    case StoreOp::add: {
      const std::int64_t sum = table_.add(request.key, request.delta);
      reply(client, request.id, encode_number(sum));
      return wake(request.key);
    }
    case StoreOp::compare_set: {
      const auto swap = table_.compare_set(request.key, request.expected, request.value);
      reply(client, request.id, std::string(swap.now));
      if (swap.changed) wake(request.key);
      return;
    }
    case StoreOp::erase: return reply(client, request.id, std::string(1, table_.erase(request.key) ? '\1' : '\0'));
    case StoreOp::num_keys: return reply(client, request.id, encode_number(static_cast<std::int64_t>(table_.size())));
    case StoreOp::check: {
      std::string flags;
      for (const std::string& key : request.keys) flags += table_.find(key) != nullptr ? '\1' : '\0';
      return reply(client, request.id, std::move(flags));
    }
    case StoreOp::multi_get:
    case StoreOp::wait: return enqueue(client, std::move(request));
    case StoreOp::cancel: {
      const auto found = waiting_.find(client);
      if (found == waiting_.end()) return;
      const auto ticket = found->second.by_id.find(request.id);
      if (ticket != found->second.by_id.end()) drop(ticket->second);
      return;
    }
  }
}

void StoreService::enqueue(Client client, StoreRequest request) {
  const std::size_t bytes = bytes_of(request.keys);
  Pending pending{client, request.id, request.op, std::move(request.keys), bytes};
  const Ticket ticket = next_ticket_++;
  if (advance(ticket, pending)) return;
  try {
    Waiting& waiting = waiting_[client];
    if (waiting.by_id.count(pending.id) != 0)
      throw ProtocolError(fmt::format("store request {} is already waiting", pending.id));
    MANIPLE_REQUIRE(waiting.by_id.size() < limits_.pending_per_client,
                    "{} requests of this client are waiting; no more are allowed", waiting.by_id.size());
    MANIPLE_REQUIRE(waiting.bytes + bytes <= limits_.pending_bytes_per_client,
                    "the waiting requests of this client name {} bytes of keys; at most {} are allowed",
                    waiting.bytes + bytes, limits_.pending_bytes_per_client);
    waiting.by_id.emplace(pending.id, ticket);
    waiting.bytes += bytes;
  } catch (...) {
    const auto queue = queues_.find(pending.keys[pending.at]);
    queue->second.erase(ticket);
    if (queue->second.empty()) queues_.erase(queue);
    throw;
  }
  pending_.emplace(ticket, std::move(pending));
}

/// Replies and returns true if no key is missing; otherwise puts the request into the queue of its first missing key.
bool StoreService::advance(Ticket ticket, Pending& pending) {
  const std::size_t count = pending.keys.size();
  for (std::size_t looked = 0; looked < count; ++looked) {
    const std::size_t i = (pending.at + looked) % count;
    if (table_.find(pending.keys[i]) != nullptr) continue;
    pending.at = i;
    queues_[pending.keys[i]].insert(ticket);
    return false;
  }
  if (pending.op == StoreOp::wait) {
    reply(pending.client, pending.id, {});
  } else {
    reply_values(pending);
  }
  return true;
}

void StoreService::wake(const std::string& key) {
  const auto found = queues_.find(key);
  if (found == queues_.end()) return;
  const std::set<Ticket> woken = std::move(found->second);
  queues_.erase(found);
  for (const Ticket ticket : woken) {
    const auto pending = pending_.find(ticket);
    if (pending == pending_.end()) continue;  // its client was dropped while others received replies
    if (!advance(ticket, pending->second)) continue;
    drop(ticket);
  }
}

void StoreService::drop(Ticket ticket) {
  const auto found = pending_.find(ticket);
  if (found == pending_.end()) return;
  const Pending& pending = found->second;
  if (const auto queue = queues_.find(pending.keys[pending.at]); queue != queues_.end()) {
    queue->second.erase(ticket);
    if (queue->second.empty()) queues_.erase(queue);
  }
  if (const auto waiting = waiting_.find(pending.client); waiting != waiting_.end()) {
    waiting->second.by_id.erase(pending.id);
    waiting->second.bytes -= pending.bytes;
    if (waiting->second.by_id.empty()) waiting_.erase(waiting);
  }
  pending_.erase(found);
}

void StoreService::forget(Client client) {
  const auto found = waiting_.find(client);
  if (found == waiting_.end()) return;
  const auto tickets = found->second.by_id;
  for (const auto& [id, ticket] : tickets) drop(ticket);
}

void StoreService::reply(Client client, std::uint32_t id, std::string body, StoreStatus status) {
  std::string bytes = encode_frame_header(id, static_cast<std::uint8_t>(status), body.size());
  bytes += body;
  send_(client, {piece(std::move(bytes))});
}

void StoreService::reply_values(const Pending& pending) {
  std::vector<Value> values;
  values.reserve(pending.keys.size());
  std::uint64_t length = sizeof(std::uint32_t);
  for (const std::string& key : pending.keys) {
    values.push_back(table_.find(key));
    length += sizeof(std::uint64_t) + values.back()->size();
  }
  if (length > kMaxReplyBytes) {
    return reply(
        pending.client, pending.id,
        fmt::format("the values of {} keys have {} bytes together; at most {} fit into one reply: ask for fewer keys",
                    values.size(), length, kMaxReplyBytes),
        StoreStatus::invalid);
  }
  Reply pieces;
  ByteWriter writer;
  writer.put_raw(encode_frame_header(pending.id, static_cast<std::uint8_t>(StoreStatus::ok), length));
  writer.put(static_cast<std::uint32_t>(values.size()));
  for (Value& value : values) {
    writer.put(static_cast<std::uint64_t>(value->size()));
    if (value->size() < kSharedFrom) {
      writer.put_raw(*value);
    } else {
      pieces.push_back(piece(writer.take()));
      writer = ByteWriter();
      pieces.push_back(std::move(value));
    }
  }
  if (!writer.bytes().empty()) pieces.push_back(piece(writer.take()));
  send_(pending.client, std::move(pieces));
}

}  // namespace maniple
