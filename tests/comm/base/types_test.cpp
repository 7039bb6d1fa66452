#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "comm/base/half.h"
#include <maniple/comm/error.h>
#include <maniple/comm/options.h>
#include <maniple/comm/types.h>
#include <maniple/version.h>

namespace maniple {
namespace {

TEST(Types, NamesAreParsedBack) {
  for (int i = 0; i < kDTypeCount; ++i) {
    EXPECT_EQ(parse_dtype(to_string(static_cast<DType>(i))), static_cast<DType>(i));
  }
  for (int i = 0; i < ReduceOp::kKindCount; ++i) {
    EXPECT_EQ(parse_reduce_op(to_string(static_cast<ReduceOp::Kind>(i))), static_cast<ReduceOp::Kind>(i));
  }
  for (int i = 0; i < kOpCount; ++i) EXPECT_EQ(parse_op(to_string(static_cast<Op>(i))), static_cast<Op>(i));
  for (const auto kind : {TransportKind::automatic, TransportKind::loopback, TransportKind::shm, TransportKind::tcp}) {
    EXPECT_EQ(parse_transport(to_string(kind)), kind);
  }
}

TEST(Version, OfHeaderAndLibraryAgree) {
  EXPECT_STREQ(version(), MANIPLE_VERSION_STRING);
  static_assert(MANIPLE_VERSION >= MANIPLE_MAKE_VERSION(0, 1, 0) && MANIPLE_VERSION < MANIPLE_MAKE_VERSION(1, 0, 0));
}

TEST(Types, UnknownNamesAreErrorsThatListTheKnown) {
  try {
    parse_dtype("float8");
    FAIL() << "there is no float8";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()).rfind("unknown dtype \"float8\"; expected one of int8, int16", 0), 0u)
        << error.what();
  }
  EXPECT_THROW(parse_op(""), InvalidArgument);
  EXPECT_THROW(parse_reduce_op("SUM"), InvalidArgument);
  EXPECT_THROW(parse_transport("rdma"), InvalidArgument);
}

TEST(Types, BuffersReportTheirElements) {
  std::vector<float> floats(3);
  EXPECT_EQ(buffer_of(floats).dtype, DType::float32);
  EXPECT_EQ(buffer_of(floats).bytes(), 12u);
  const std::array<bfloat16, 2> halves{};
  EXPECT_EQ(buffer_of(halves).dtype, DType::bfloat16);
  EXPECT_EQ(buffer_of(halves).bytes(), 4u);
  std::int64_t number = 0;
  EXPECT_EQ(buffer_of(number).dtype, DType::int64);
  EXPECT_EQ(buffer_of(number).data, &number);
  EXPECT_EQ(dtype_of<bool>(), DType::bool8);
  EXPECT_EQ(dtype_of<std::byte>(), DType::uint8);
  EXPECT_EQ(dtype_of<const signed char>(), DType::int8);
  EXPECT_EQ(dtype_of<long long>(), DType::int64);
}

/// The value of float16 bits, by the formula.
double value_of(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

bool is_nan(std::uint16_t bits) { return (bits & 0x7c00) == 0x7c00 && (bits & 0x3ff) != 0; }

float16 float16_of(std::uint16_t bits) {
  float16 value;
  value.bits = bits;
  return value;
}

bfloat16 bfloat16_of(std::uint16_t bits) {
  bfloat16 value;
  value.bits = bits;
  return value;
}

TEST(Float16, EveryValueConvertsExactlyAndComesBack) {
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = static_cast<float>(float16_of(bits));
    if (is_nan(bits)) {
      ASSERT_TRUE(std::isnan(value));
      ASSERT_EQ(float16(value).bits, bits | 0x200) << "NaN becomes quiet and keeps sign and payload";
      continue;
    }
    if ((bits & 0x7fff) == 0x7c00) {
      ASSERT_EQ(value, (bits & 0x8000) != 0 ? -INFINITY : INFINITY);
    } else {
      ASSERT_EQ(static_cast<double>(value), value_of(bits)) << std::hex << i;
    }
    ASSERT_EQ(float16(value).bits, bits) << std::hex << i;
  }
}

TEST(Float16, RoundsToNearestTiesToEven) {
  // Between every two neighbours: just below the middle, the middle, just above it.
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const auto next = static_cast<std::uint16_t>(bits + 1);
    const auto middle = static_cast<float>((value_of(bits) + value_of(next)) / 2);
    const std::uint16_t even = (bits & 1) == 0 ? bits : next;
    for (const float sign : {1.0f, -1.0f}) {
      const auto signed_bits = [sign](std::uint16_t b) { return sign < 0 ? b | 0x8000 : b; };
      ASSERT_EQ(float16(sign * middle).bits, signed_bits(even)) << std::hex << bits;
      ASSERT_EQ(float16(sign * std::nextafter(middle, 0.0f)).bits, signed_bits(bits)) << std::hex << bits;
      ASSERT_EQ(float16(sign * std::nextafter(middle, 1e9f)).bits, signed_bits(next)) << std::hex << bits;
    }
  }
}

TEST(Float16, Limits) {
  EXPECT_EQ(float16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(float16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(float16(INFINITY).bits, 0x7c00);
  EXPECT_EQ(float16(0x1p-25f).bits, 0x0000);
  EXPECT_EQ(float16(std::nextafter(0x1p-25f, 1.0f)).bits, 0x0001);
  EXPECT_EQ(float16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  EXPECT_EQ(float16(-0.0f).bits, 0x8000);
  EXPECT_TRUE(is_nan(float16(std::bit_cast<float>(0x7f800001u)).bits)) << "a payload in the low bits must not give inf";
}

TEST(Bfloat16, EveryValueIsTheUpperHalfOfAFloatAndComesBack) {
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const float value = static_cast<float>(bfloat16_of(static_cast<std::uint16_t>(i)));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), i << 16);
    ASSERT_EQ(half::bfloat16_from_float(value), std::isnan(value) ? i | 0x40 : i) << std::hex << i;
  }
}

TEST(Bfloat16, RoundsToNearestTiesToEven) {
  for (std::uint32_t i = 0; i < 0x7f80; ++i) {
    const auto at = [i](std::uint32_t low) { return bfloat16(std::bit_cast<float>(i << 16 | low)).bits; };
    ASSERT_EQ(at(0x7fff), i);
    ASSERT_EQ(at(0x8000), i + (i & 1));
    ASSERT_EQ(at(0x8001), i + 1) << "the largest rounds to infinity";
    ASSERT_EQ(bfloat16(std::bit_cast<float>(0x80000000u | i << 16 | 0x8001)).bits, 0x8000 | (i + 1));
  }
}

TEST(Bfloat16, NanStaysNan) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u}) {
    EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(std::bit_cast<float>(bits))))) << std::hex << bits;
  }
}

}  // namespace

}  // namespace maniple
