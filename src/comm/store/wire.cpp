#include "comm/store/wire.h"

#include <algorithm>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/codec.h"

namespace maniple {
namespace {

constexpr std::size_t kMaxErrorBytes = 4096;

std::string get_key(ByteReader& reader) {
  // Reads keys beyond the limit, too, so that the reply can describe the error.
  std::string key(reader.get_string(reader.left()));
  require_key(key);
  return key;
}

std::vector<std::string> get_keys(ByteReader& reader) {
  const auto count = reader.get<std::uint32_t>();
  // Each key takes at least its length and one byte, so an impossible count is rejected before memory is allocated for
  // it.
  constexpr std::size_t kLeastBytes = sizeof(std::uint32_t) + 1;
  if (count > reader.left() / kLeastBytes) {
    throw ProtocolError(fmt::format("{} keys announced in {} bytes", count, reader.left()));
  }
  MANIPLE_REQUIRE(count <= kMaxKeysPerRequest, "{} keys in one request; at most {} are allowed", count,
                  kMaxKeysPerRequest);
  std::vector<std::string> keys;
  keys.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) keys.push_back(get_key(reader));
  return keys;
}

std::optional<std::uint64_t> request_limit(std::uint8_t code) {
  constexpr std::uint64_t kKey = sizeof(std::uint32_t) + kMaxKeyBytes;
  switch (static_cast<StoreOp>(code)) {
    case StoreOp::set: return kKey + kMaxValueBytes;
    case StoreOp::compare_set: return kKey + sizeof(std::uint32_t) + 2 * kMaxValueBytes;
    case StoreOp::multi_get:
    case StoreOp::wait:
    case StoreOp::check: return kMaxKeyListBytes;
    case StoreOp::add: return kKey + sizeof(std::int64_t);
    case StoreOp::erase: return kKey;
    case StoreOp::num_keys:
    case StoreOp::cancel: return 0;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> reply_limit(std::uint8_t code) {
  switch (static_cast<StoreStatus>(code)) {
    case StoreStatus::ok: return kMaxReplyBytes;
    case StoreStatus::invalid:
    case StoreStatus::protocol: return kMaxErrorBytes;
  }
  return std::nullopt;
}

struct StoreHeader {
  std::uint32_t id;
  std::uint8_t code;
  std::string_view zero;
  std::uint64_t length;

  explicit StoreHeader(std::string_view bytes) {
    ByteReader reader(bytes);
    id = reader.get<std::uint32_t>();
    code = reader.get<std::uint8_t>();
    zero = reader.get_raw(3);
    length = reader.get<std::uint64_t>();
  }
};

MessageFormat::Length length_in(std::string_view bytes, std::optional<std::uint64_t> (*limit_of)(std::uint8_t)) {
  const StoreHeader header(bytes);
  const auto limit = limit_of(header.code);
  if (!limit || header.zero != std::string_view("\0\0\0", 3)) {
    throw ProtocolError(fmt::format("unknown code {} in a store frame", header.code));
  }
  return {header.length, *limit};
}

}  // namespace

MessageFormat::Length request_length(std::string_view header) { return length_in(header, &request_limit); }
MessageFormat::Length reply_length(std::string_view header) { return length_in(header, &reply_limit); }

std::uint32_t frame_id(std::string_view header) { return StoreHeader(header).id; }

Frame frame_of(WireMessage message) {
  const StoreHeader header({message.header.data(), kStoreHeaderBytes});
  return {header.id, header.code, std::move(message.body)};
}

std::string encode_frame_header(std::uint32_t id, std::uint8_t code, std::uint64_t length) {
  ByteWriter writer;
  writer.put(id);
  writer.put(code);
  writer.put_raw(std::string_view("\0\0\0", 3));
  writer.put(length);
  return writer.take();
}

StoreRequest decode_request(Frame frame) {
  StoreRequest request;
  request.op = static_cast<StoreOp>(frame.code);
  request.id = frame.id;
  ByteReader reader(frame.body);
  switch (request.op) {
    case StoreOp::set:
      request.key = get_key(reader);
      request.value = reader.get_raw(reader.left());
      require_value(request.value);
      break;
    case StoreOp::compare_set:
      request.key = get_key(reader);
      request.expected = reader.get_string(reader.left());
      request.value = reader.get_raw(reader.left());
      require_value(request.expected);
      require_value(request.value);
      break;
    case StoreOp::multi_get:
    case StoreOp::wait:
    case StoreOp::check: request.keys = get_keys(reader); break;
    case StoreOp::add:
      request.key = get_key(reader);
      request.delta = reader.get<std::int64_t>();
      break;
    case StoreOp::erase: request.key = get_key(reader); break;
    case StoreOp::num_keys:
    case StoreOp::cancel: break;
    default: throw ProtocolError(fmt::format("unknown store operation {}", frame.code));
  }
  reader.expect_end();
  return request;
}

std::string encode_keys(std::span<const std::string> keys) {
  ByteWriter writer;
  writer.put(static_cast<std::uint32_t>(keys.size()));
  for (const std::string& key : keys) writer.put_string(key);
  return writer.take();
}

std::vector<std::string> decode_values(std::string_view body, std::size_t expected_count) {
  ByteReader reader(body);
  const auto count = reader.get<std::uint32_t>();
  if (count != expected_count)
    throw ProtocolError(fmt::format("{} values where {} were asked for", count, expected_count));
  std::vector<std::string> values;
  values.reserve(std::min<std::size_t>(count, reader.left() / sizeof(std::uint64_t)));
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto length = reader.get<std::uint64_t>();
    values.emplace_back(reader.get_raw(length));
  }
  reader.expect_end();
  return values;
}

std::vector<bool> decode_flags(std::string_view body, std::size_t expected_count) {
  if (body.size() != expected_count) {
    throw ProtocolError(fmt::format("{} flags where {} were asked for", body.size(), expected_count));
  }
  std::vector<bool> flags;
  flags.reserve(body.size());
  for (const char flag : body) flags.push_back(flag != 0);
  return flags;
}

}  // namespace maniple
