#include "comm/session/detector_message.h"

#include <algorithm>
#include <array>
#include <concepts>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "comm/base/codec.h"
#include "comm/base/error_codec.h"

namespace maniple::detector {
namespace {

constexpr std::size_t kMaxGroup = 1024;
constexpr std::size_t kMaxText = 48 * 1024;
constexpr std::size_t kMaxPlace = 1024;
constexpr std::size_t kMaxCall = 4096;

template <class T, class Wanted>
concept Is = std::same_as<std::remove_const_t<T>, Wanted>;

class Writer {
 public:
  explicit Writer(ByteWriter& bytes) : bytes_(bytes) {}
  void number(std::integral auto value) { bytes_.put(value); }
  void flag(bool value) { bytes_.put(static_cast<std::uint8_t>(value ? 1 : 0)); }
  void text(std::string_view text, std::size_t limit) { bytes_.put_string(text.substr(0, limit)); }
  void error(const ErrorInfo& error) { bytes_.put_string(encode_error(error, kMaxText)); }
  void ranks(const std::vector<std::int32_t>& ranks) {
    const std::size_t count = std::min(ranks.size(), kMaxMembers);
    bytes_.put(static_cast<std::uint32_t>(count));
    for (std::size_t i = 0; i < count; ++i) bytes_.put(ranks[i]);
  }

 private:
  ByteWriter& bytes_;
};

class Reader {
 public:
  explicit Reader(ByteReader& bytes) : bytes_(bytes) {}
  template <std::integral T>
  void number(T& value) {
    value = bytes_.get<T>();
  }
  void flag(bool& value) {
    const auto byte = bytes_.get<std::uint8_t>();
    if (byte > 1) throw ProtocolError(fmt::format("a control message of a rank with the flag {}", byte));
    value = byte != 0;
  }
  void text(std::string& text, std::size_t limit) { text = bytes_.get_string(limit); }
  void error(ErrorInfo& error) { error = decode_error(bytes_.get_string(kMaxText)); }
  void ranks(std::vector<std::int32_t>& ranks) {
    const auto count = bytes_.get<std::uint32_t>();
    if (count > kMaxMembers) {
      throw ProtocolError(
          fmt::format("a control message of a rank that waits for {} ranks, more than {}", count, kMaxMembers));
    }
    for (std::uint32_t i = 0; i < count; ++i) ranks.push_back(bytes_.get<std::int32_t>());
  }

 private:
  ByteReader& bytes_;
};

// The fields of each message, in the order in which they are sent. One list serves both directions.
void fields(auto&, Is<Heartbeat> auto&) {}
void fields(auto&, Is<Leaving> auto&) {}
void fields(auto&, Is<QueryAlive> auto&) {}
void fields(auto&, Is<Alive> auto&) {}
void fields(auto& io, Is<Left> auto& message) { io.number(message.rank); }
void fields(auto& io, Is<Gone> auto& message) { io.number(message.rank); }
void fields(auto& io, Is<Lost> auto& message) {
  io.number(message.rank);
  io.text(message.text, kMaxText);
}
void fields(auto& io, Is<QueryCall> auto& message) {
  io.number(message.seq);
  io.text(message.group, kMaxGroup);
}
void fields(auto& io, Is<QueryProgress> auto& message) { io.text(message.group, kMaxGroup); }

void call_fields(auto& io, auto& message) {
  io.number(message.rank);
  io.number(message.seq);
  io.text(message.group, kMaxGroup);
}
void fields(auto& io, Is<Departed> auto& message) { call_fields(io, message); }
void fields(auto& io, Is<CallPending> auto& message) { call_fields(io, message); }
void fields(auto& io, Is<Compare> auto& message) {
  call_fields(io, message);
  io.flag(message.arguments);
  io.ranks(message.members);
}
void fields(auto& io, Is<Shrink> auto& message) {
  call_fields(io, message);
  io.flag(message.made);
  io.ranks(message.members);
}
void fields(auto& io, Is<Survivors> auto& message) {
  io.number(message.seq);
  io.text(message.group, kMaxGroup);
  io.flag(message.confirmed);
  io.ranks(message.members);
}
void fields(auto& io, Is<CancelShrink> auto& message) {
  io.number(message.rank);
  io.text(message.group, kMaxGroup);
}
void fields(auto& io, Is<Missing> auto& message) {
  io.text(message.group, kMaxGroup);
  io.ranks(message.members);
}
void fields(auto& io, Is<Abort> auto& message) {
  call_fields(io, message);
  io.error(message.error);
}
void fields(auto& io, Is<CallReply> auto& message) {
  call_fields(io, message);
  io.text(message.call, kMaxText);
  io.text(message.place, kMaxPlace);
}
void fields(auto& io, Is<ProgressReply> auto& message) {
  call_fields(io, message);
  io.text(message.text, kMaxText);
}
void fields(auto& io, Is<Waiting> auto& message) {
  call_fields(io, message);
  io.text(message.call, kMaxCall);
  io.number(message.waited_ms);
  io.ranks(message.members);
}

constexpr std::size_t kKinds = std::variant_size_v<Message>;

template <std::size_t index>
Message decode_fields(ByteReader& bytes) {
  Message message(std::in_place_index<index>);
  Reader reader(bytes);
  fields(reader, std::get<index>(message));
  return message;
}

template <std::size_t... index>
constexpr auto decoders(std::index_sequence<index...>) {
  return std::array{&decode_fields<index>...};
}

}  // namespace

std::string encode(const Message& message) {
  ByteWriter body;
  body.put(static_cast<std::uint8_t>(message.index() + 1));
  Writer writer(body);
  std::visit([&](const auto& it) { fields(writer, it); }, message);
  ByteWriter frame;
  frame.put_string(body.bytes());
  return frame.take();
}

Message decode(std::string_view body) {
  static constexpr auto kDecoders = decoders(std::make_index_sequence<kKinds>());
  ByteReader bytes(body);
  const auto kind = bytes.get<std::uint8_t>();
  if (kind < 1 || kind > kKinds) throw ProtocolError("a control message of unknown kind " + std::to_string(kind));
  Message message = kDecoders[kind - 1U](bytes);
  bytes.expect_end();
  return message;
}

}  // namespace maniple::detector
