// The wire format between a store's client and its server. Free of I/O, so that it can be tested and fuzzed alone.
//
//   frame    id:u32 code:u8 zero[3] length:u64, body[length]
//
// In a request, `code` is the operation and `id` any number not in use; the reply carries the same id and a status.
// `cancel` withdraws the pending request with its id and has no reply. Strings are length:u32 and bytes; a frame's last
// value is the rest of its body.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/net/message_stream.h"
#include "comm/store/key_table.h"

namespace maniple {

enum class StoreOp : std::uint8_t {
  set = 1,      ///< key:str value          -> nothing
  multi_get,    ///< count:u32 keys:str...  -> count:u32 (length:u64 value)...
  wait,         ///< count:u32 keys:str...  -> nothing
  check,        ///< count:u32 keys:str...  -> one byte, 0 or 1, for each
  add,          ///< key:str delta:i64      -> sum:i64
  compare_set,  ///< key:str expected:str desired -> value
  erase,        ///< key:str                -> 0 or 1:u8
  num_keys,     ///<                        -> count:i64
  cancel,
};

enum class StoreStatus : std::uint8_t {
  ok = 0,
  invalid = 1,   ///< the body describes the invalid request; the connection stays open
  protocol = 2,  ///< the body describes the invalid bytes; the server closes the connection
};

inline constexpr std::size_t kStoreHeaderBytes = 16;
inline constexpr std::size_t kMaxKeyListBytes = std::size_t{16} << 20;  ///< of the keys in one request
inline constexpr std::size_t kMaxReplyBytes = std::size_t{256} << 20;

struct Frame {
  std::uint32_t id = 0;
  std::uint8_t code = 0;
  std::string body;
};

MessageFormat::Length request_length(std::string_view header);  ///< the limit depends on the operation
MessageFormat::Length reply_length(std::string_view header);    ///< the limit depends on the status
inline constexpr MessageFormat kStoreRequests{kStoreHeaderBytes, &request_length};
inline constexpr MessageFormat kStoreReplies{kStoreHeaderBytes, &reply_length};

std::uint32_t frame_id(std::string_view header);
Frame frame_of(WireMessage message);
std::string encode_frame_header(std::uint32_t id, std::uint8_t code, std::uint64_t length);

struct StoreRequest {
  StoreOp op = StoreOp::num_keys;
  std::uint32_t id = 0;
  std::string key;
  std::vector<std::string> keys;
  std::string expected;
  std::string value;
  std::int64_t delta = 0;
};
/// Throws ProtocolError for malformed bytes, InvalidArgument for a well-formed request that exceeds the limits.
StoreRequest decode_request(Frame frame);

/// Encodings of the non-trivial bodies.
std::string encode_keys(std::span<const std::string> keys);
std::vector<std::string> decode_values(std::string_view body, std::size_t expected_count);
std::vector<bool> decode_flags(std::string_view body, std::size_t expected_count);

}  // namespace maniple
