#include "comm/base/codec.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace maniple {
namespace {

enum class Colour : std::uint16_t { red = 0x1234 };

TEST(Codec, IntegersAreLittleEndianOfTheirOwnSize) {
  ByteWriter writer;
  writer.put(std::uint8_t{0x01});
  writer.put(std::uint16_t{0x0302});
  writer.put(std::uint32_t{0x07060504});
  writer.put(std::uint64_t{0x0f0e0d0c0b0a0908});
  ASSERT_EQ(writer.bytes().size(), 15u);
  for (std::size_t i = 0; i < 15; ++i) EXPECT_EQ(writer.bytes()[i], static_cast<char>(i + 1));
}

TEST(Codec, WrittenValuesAreReadBack) {
  ByteWriter writer;
  writer.put(std::int8_t{-1});
  writer.put(std::numeric_limits<std::int16_t>::min());
  writer.put(std::numeric_limits<std::int32_t>::min());
  writer.put(std::numeric_limits<std::int64_t>::min());
  writer.put(std::numeric_limits<std::uint64_t>::max());
  writer.put(Colour::red);
  writer.put_string(std::string("a\0b", 3));
  writer.put_string("");
  writer.put_raw("xyz");
  const std::string bytes = writer.take();
  ByteReader reader(bytes);
  EXPECT_EQ(reader.get<std::int8_t>(), -1);
  EXPECT_EQ(reader.get<std::int16_t>(), std::numeric_limits<std::int16_t>::min());
  EXPECT_EQ(reader.get<std::int32_t>(), std::numeric_limits<std::int32_t>::min());
  EXPECT_EQ(reader.get<std::int64_t>(), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(reader.get<std::uint64_t>(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(reader.get<Colour>(), Colour::red);
  EXPECT_EQ(reader.get_string(3), std::string_view("a\0b", 3));
  EXPECT_EQ(reader.get_string(0), "");
  EXPECT_EQ(reader.left(), 3u);
  EXPECT_EQ(reader.get_raw(3), "xyz");
  EXPECT_NO_THROW(reader.expect_end());
}

TEST(Codec, EveryTruncationIsAnError) {
  ByteWriter writer;
  writer.put(std::uint32_t{7});
  writer.put_string("hello");
  const std::string whole = writer.take();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    ByteReader reader(std::string_view(whole).substr(0, size));
    EXPECT_THROW(
        {
          reader.get<std::uint32_t>();
          reader.get_string(100);
        },
        ProtocolError)
        << size << " bytes";
  }
}

TEST(Codec, LengthsAreNotTrusted) {
  for (const std::uint32_t length : {6u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    ByteWriter writer;
    writer.put(length);
    writer.put_raw("hello");
    const std::string bytes = writer.take();
    EXPECT_THROW(ByteReader(bytes).get_string(5), ProtocolError) << "over the limit";
    EXPECT_THROW(ByteReader(bytes).get_string(std::numeric_limits<std::size_t>::max()), ProtocolError) << "over end";
  }
  EXPECT_THROW(ByteReader("abc").get_raw(std::numeric_limits<std::size_t>::max()), ProtocolError);
}

TEST(Codec, BytesTooManyAreAnErrorThatCountsThem) {
  ByteReader reader("abc");
  reader.get<std::uint8_t>();
  try {
    reader.expect_end();
    FAIL() << "2 bytes are left";
  } catch (const ProtocolError& error) {
    EXPECT_STREQ(error.what(), "2 bytes too many");
  }
}

}  // namespace
}  // namespace maniple
