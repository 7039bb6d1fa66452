#include <maniple/comm/types.h>

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include <maniple/comm/error.h>
#include <maniple/comm/options.h>

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

TEST(Types, BuffersKnowTheirElements) {
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

}  // namespace
}  // namespace maniple
