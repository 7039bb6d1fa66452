#include "launch/coordinate/agent_message.h"

#include "comm/base/codec.h"

namespace maniple::launch {
namespace {

constexpr std::size_t kMaxText = std::size_t{64} << 10;
constexpr std::size_t kMaxSetting = std::size_t{256} << 10;
constexpr std::uint32_t kMaxSettings = 65536;
constexpr std::uint32_t kMaxTail = 64;

void put_list(ByteWriter& out, const std::vector<std::string>& list) {
  out.put(static_cast<std::uint32_t>(list.size()));
  for (const std::string& text : list) out.put_string(text);
}

std::vector<std::string> get_list(ByteReader& in, std::uint32_t most, std::size_t longest) {
  const auto count = in.get<std::uint32_t>();
  if (count > most) throw ProtocolError("a list of " + std::to_string(count) + " texts");
  std::vector<std::string> list;
  for (std::uint32_t i = 0; i < count; ++i) list.emplace_back(in.get_string(longest));
  return list;
}

/// Visits a message's numbers in wire order.
template <class Message, class Visit>
void each_number(Message& message, Visit visit) {
  visit(message.generation);
  visit(message.restarts);
  visit(message.node_rank);
  visit(message.node_count);
  visit(message.processes);
  visit(message.devices_per_process);
  visit(message.first_rank);
  visit(message.world_size);
  visit(message.core_first);
  visit(message.core_total);
  visit(message.min_nodes);
  visit(message.max_nodes);
  visit(message.signal);
  visit(message.grace_ms);
  visit(message.code);
  visit(message.port);
  visit(message.heartbeat_ms);
  visit(message.silence_ms);
  visit(message.exit.rank);
  visit(message.exit.node_rank);
  visit(message.exit.pid);
  visit(message.exit.code);
  visit(message.exit.signal);
  visit(message.exit.blamed);
  visit(message.exit.left);
}

}  // namespace

std::string encode(const AgentMessage& message) {
  ByteWriter out;
  out.put(message.kind);
  each_number(message, [&](int value) { out.put(static_cast<std::int32_t>(value)); });
  out.put(message.exit.at_us);
  out.put(static_cast<std::uint8_t>(message.exit.consequence));
  out.put_string(message.host);
  out.put_string(std::string_view(message.text).substr(0, kMaxText));
  put_list(out, message.settings);
  out.put_string(message.exit.host);
  out.put_string(message.exit.cause);
  out.put_string(message.exit.error);
  put_list(out, message.exit.tail);
  return out.take();
}

AgentMessage decode_agent_message(std::string_view bytes) {
  ByteReader in(bytes);
  AgentMessage message;
  message.kind = in.get<AgentMessage::Kind>();
  if (message.kind < AgentMessage::Kind::join || message.kind > AgentMessage::Kind::exited) {
    throw ProtocolError("a message of unknown kind " + std::to_string(static_cast<int>(message.kind)));
  }
  each_number(message, [&](int& value) { value = in.get<std::int32_t>(); });
  message.exit.at_us = in.get<std::int64_t>();
  const auto consequence = in.get<std::uint8_t>();
  if (consequence > 1) throw ProtocolError("a flag that is " + std::to_string(consequence));
  message.exit.consequence = consequence == 1;
  message.host = in.get_string(kMaxText);
  message.text = in.get_string(kMaxText);
  message.settings = get_list(in, kMaxSettings, kMaxSetting);
  message.exit.host = in.get_string(kMaxText);
  message.exit.cause = in.get_string(kMaxText);
  message.exit.error = in.get_string(kMaxText);
  message.exit.tail = get_list(in, kMaxTail, kMaxText);
  in.expect_end();
  return message;
}

}  // namespace maniple::launch
