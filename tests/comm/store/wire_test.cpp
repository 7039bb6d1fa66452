#include "comm/store/wire.h"

#include <gtest/gtest.h>

#include "comm/base/codec.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

std::uint8_t code(StoreOp op) { return static_cast<std::uint8_t>(op); }

std::string framed(StoreOp op, std::string_view body) {
  return encode_frame_header(9, code(op), body.size()) + std::string(body);
}

TEST(StoreWire, AnySplitGivesTheSameFrames) {
  const std::string bytes = framed(StoreOp::set, std::string("\1\0\0\0kvalue", 10)) + framed(StoreOp::num_keys, "");
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    MessageReader reader(kStoreRequests);
    std::vector<Frame> frames;
    for (std::string_view part : {std::string_view(bytes).substr(0, cut), std::string_view(bytes).substr(cut)}) {
      while (auto message = reader.next(part)) frames.push_back(frame_of(std::move(*message)));
      EXPECT_TRUE(part.empty());
    }
    ASSERT_EQ(frames.size(), 2u) << cut;
    EXPECT_EQ(frames[0].id, 9u);
    EXPECT_EQ(decode_request(frames[0]).value, "value");
    EXPECT_EQ(frames[1].code, code(StoreOp::num_keys));
  }
}

TEST(StoreWire, ImpossibleLengthsEndBeforeAnythingIsAllocated) {
  for (const std::uint64_t length :
       {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1} << 32, std::uint64_t{1} << 30}) {
    for (int op = 1; op <= code(StoreOp::cancel); ++op) {
      MessageReader reader(kStoreRequests);
      const std::string header = encode_frame_header(1, static_cast<std::uint8_t>(op), length);
      std::string_view bytes = header;
      EXPECT_THROW(reader.next(bytes), ProtocolError);
    }
  }
}

TEST(StoreWire, UnknownCodesAndPaddingAreRefused) {
  for (int op : {0, 10, 255}) {
    MessageReader reader(kStoreRequests);
    const std::string header = encode_frame_header(1, static_cast<std::uint8_t>(op), 0);
    std::string_view bytes = header;
    EXPECT_THROW(reader.next(bytes), ProtocolError) << op;
  }
  MessageReader reader(kStoreRequests);
  std::string header = encode_frame_header(1, code(StoreOp::num_keys), 0);
  header[6] = 1;
  std::string_view bytes = header;
  EXPECT_THROW(reader.next(bytes), ProtocolError);
}

TEST(StoreWire, KeyListsWithExcessiveCountsAreRefused) {
  ByteWriter writer;
  writer.put(std::uint32_t{0xffffffff});
  EXPECT_THROW(decode_request({1, code(StoreOp::wait), writer.bytes()}), ProtocolError);
  writer.put(std::uint32_t{0xffffffff});  // a key of 4 GiB
  EXPECT_THROW(decode_request({1, code(StoreOp::wait), writer.bytes()}), ProtocolError);
}

TEST(StoreWire, TooManyOrTooLongKeysThrowInvalidArgument) {
  const std::vector<std::string> many(kMaxKeysPerRequest + 1, "k");
  EXPECT_THROW(decode_request({1, code(StoreOp::check), encode_keys(many)}), InvalidArgument);
  const std::vector<std::string> longer(1, std::string(kMaxKeyBytes + 1, 'k'));
  EXPECT_THROW(decode_request({1, code(StoreOp::check), encode_keys(longer)}), InvalidArgument);
  EXPECT_THROW(decode_request({1, code(StoreOp::check), encode_keys(std::vector<std::string>{"a", ""})}), Error);
}

TEST(StoreWire, TruncatedBodiesAreRefused) {
  ByteWriter writer;
  writer.put_string("counter");
  writer.put(std::int64_t{-5});
  const std::string body = writer.bytes();
  EXPECT_EQ(decode_request({1, code(StoreOp::add), body}).delta, -5);
  for (std::size_t length = 0; length < body.size(); ++length) {
    EXPECT_THROW(decode_request({1, code(StoreOp::add), body.substr(0, length)}), Error) << length;
  }
  EXPECT_THROW(decode_request({1, code(StoreOp::add), body + "x"}), ProtocolError);
}

TEST(StoreWire, InconsistentLengthsAreRefused) {
  ByteWriter writer;
  writer.put(std::uint32_t{1});
  writer.put(~std::uint64_t{0});
  EXPECT_THROW(decode_values(writer.bytes(), 1), ProtocolError);
  EXPECT_THROW(decode_values(writer.bytes(), 2), ProtocolError);
  EXPECT_THROW(decode_flags("ab", 3), ProtocolError);
}

}  // namespace
}  // namespace maniple
