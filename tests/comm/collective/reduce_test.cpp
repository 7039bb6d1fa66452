// What reduce promises beyond the matrix: accumulation, NaN, stages, errors.
#include "comm/collective/reduce/reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "comm/collective/reduce/kernels.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

template <class T>
std::vector<T> reduce_all(const ReduceKernels& kernels, Reduction reduction,
                          const std::vector<std::vector<T>>& sources) {
  reduction.dtype = dtype_of<T>();
  std::vector<T> result(sources[0].size());
  std::vector<const void*> from;
  for (const auto& source : sources) from.push_back(source.data());
  void* to = result.data();
  reduce_with(kernels, reduction, from, {&to, 1}, result.size());
  return result;
}

/// One value per source, at each place of a buffer long enough to pass through blocks, vectors and single elements.
template <class T>
void expect_everywhere(Reduction reduction, const std::vector<float>& values, float expected) {
  constexpr std::size_t kCount = 333;
  for (const ReduceKernels* kernels : supported_reduce_kernels()) {
    std::vector<std::vector<T>> sources;
    for (const float value : values) sources.emplace_back(kCount, T(value));
    for (const T& element : reduce_all<T>(*kernels, reduction, sources)) {
      const auto got = static_cast<float>(element);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(got)) << kernels->name << " " << to_string(reduction.op.kind());
      } else {
        ASSERT_EQ(got, expected) << kernels->name << " " << to_string(reduction.op.kind());
      }
    }
  }
}

TEST(Reduce, HalvesAreAccumulatedInFloat32AndRoundedOnce) {
  const Reduction sum{.op = ReduceOp::sum};
  expect_everywhere<float16>(sum, {2048, 1, 1}, 2050);             // rounding after each addition would stay at 2048
  expect_everywhere<float16>(sum, {60000, 60000, -60000}, 60000);  // and here it would reach infinity
  expect_everywhere<bfloat16>(sum, {256, 1, 1}, 258);
  expect_everywhere<float16>({.op = ReduceOp::avg, .divide_by = 2}, {65504, 65504}, 65504);
  expect_everywhere<float16>({.op = ReduceOp::avg, .divide_by = 3}, {65504, 65504, 65504}, 65504);
  expect_everywhere<float16>(sum, {65504, 65504}, INFINITY);
  expect_everywhere<float16>({.op = ReduceOp::product}, {256, 256, 1.0f / 256}, 256);
  expect_everywhere<float16>({.op = ReduceOp::premultiplied(0.5)}, {65504, 65504}, 65504);
}

template <class T>
void expect_nan_wins() {
  for (const auto kind : {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
    for (const std::size_t sources : {2, 3, 5}) {
      for (std::size_t place = 0; place < sources; ++place) {
        std::vector<float> values(sources, 1);
        values[place] = NAN;
        expect_everywhere<T>({.op = kind, .divide_by = kind == ReduceOp::avg ? 2 : 1}, values, NAN);
      }
    }
  }
}

TEST(Reduce, NanFactorGivesNanWhateverItsPayload) {
  const auto op = ReduceOp::premultiplied(std::bit_cast<double>(~std::uint64_t{0} >> 1));
  expect_everywhere<float>({.op = op}, {1, 2}, NAN);
  expect_everywhere<float16>({.op = op}, {1, 2}, NAN);
  expect_everywhere<bfloat16>({.op = op}, {1, 2}, NAN);
}

TEST(Reduce, NanWins) {
  expect_nan_wins<float>();
  expect_nan_wins<double>();
  expect_nan_wins<float16>();
  expect_nan_wins<bfloat16>();
}

TEST(Reduce, EveryNanOfAHalfStaysNan) {
  // All payloads, signalling ones included: rounding must not turn them into infinity or zero.
  for (const ReduceKernels* kernels : supported_reduce_kernels()) {
    for (const auto kind : {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
      for (const std::size_t place : {0, 1}) {
        std::vector<std::vector<float16>> float16s(2, std::vector<float16>(65536, float16(1)));
        std::vector<std::vector<bfloat16>> bfloat16s(2, std::vector<bfloat16>(65536, bfloat16(1)));
        for (std::uint32_t bits = 0; bits < 65536; ++bits) {
          float16s[place][bits].bits = static_cast<std::uint16_t>(bits);
          bfloat16s[place][bits].bits = static_cast<std::uint16_t>(bits);
        }
        const auto a = reduce_all<float16>(*kernels, {.op = kind}, float16s);
        const auto b = reduce_all<bfloat16>(*kernels, {.op = kind}, bfloat16s);
        for (std::uint32_t i = 0; i < 65536; ++i) {
          ASSERT_EQ(std::isnan(static_cast<float>(a[i])), std::isnan(static_cast<float>(float16s[place][i]))) << i;
          ASSERT_EQ(std::isnan(static_cast<float>(b[i])), std::isnan(static_cast<float>(bfloat16s[place][i]))) << i;
        }
      }
    }
  }
}

TEST(Reduce, TwoHalvesGiveTheSameBitsOnEveryInstructionSet) {
  // Some sets add two float16 natively; that must not show. Each value meets many others.
  std::vector<std::vector<float16>> sources(2, std::vector<float16>(65536));
  for (std::uint32_t step = 0; step < 64; ++step) {
    for (std::uint32_t i = 0; i < 65536; ++i) {
      sources[0][i].bits = static_cast<std::uint16_t>(i);
      sources[1][i].bits = static_cast<std::uint16_t>(i * 40503u + step * 9973u);
    }
    for (const ReduceKernels* kernels : supported_reduce_kernels()) {
      const auto result = reduce_all<float16>(*kernels, {.op = ReduceOp::sum}, sources);
      for (std::uint32_t i = 0; i < 65536; ++i) {
        const float16 expected(static_cast<float>(sources[0][i]) + static_cast<float>(sources[1][i]));
        ASSERT_TRUE(result[i].bits == expected.bits || std::isnan(static_cast<float>(expected)))
            << kernels->name << " " << sources[0][i].bits << " + " << sources[1][i].bits;
      }
    }
  }
}

TEST(Reduce, OneSourceIsCopiedToTheBit) {
  const float signalling = std::bit_cast<float>(0x7f800001u);
  for (const auto kind : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max, ReduceOp::avg}) {
    float from = signalling;
    std::uint32_t to[2] = {};
    const void* source = &from;
    void* destinations[] = {&to[0], &to[1]};
    reduce({.dtype = DType::float32, .op = kind}, {&source, 1}, destinations, 1);
    EXPECT_EQ(to[0], 0x7f800001u);
    EXPECT_EQ(to[1], 0x7f800001u);
  }
}

TEST(Reduce, StagesOfAnAverageDivideOnce) {
  const ReduceKernels& kernels = *supported_reduce_kernels().front();
  const auto half = reduce_all<float>(kernels, {.op = ReduceOp::avg, .divide_by = 1}, {{1, 2}, {3, 4}});
  const auto whole = reduce_all<float>(kernels, {.op = ReduceOp::avg, .divide_by = 4}, {half, {5, 6}, {7, 8}});
  EXPECT_EQ(whole, (std::vector<float>{4, 5}));
}

TEST(Reduce, StagesOfAPremultipliedSumMultiplyOnce) {
  const ReduceKernels& kernels = *supported_reduce_kernels().front();
  const auto op = ReduceOp::premultiplied(10);
  const auto first = reduce_all<std::int16_t>(kernels, {.op = op}, {{1}, {2}});
  const auto other = reduce_all<std::int16_t>(kernels, {.op = op}, {{3}});
  EXPECT_EQ(reduce_all<std::int16_t>(kernels, {.op = op, .premultiply = false}, {first, other})[0], 60);
}

TEST(Reduce, IntegersWrapAndAveragesTruncateTowardsZero) {
  const ReduceKernels& kernels = *supported_reduce_kernels().front();
  using I8 = std::int8_t;
  EXPECT_EQ(reduce_all<I8>(kernels, {.op = ReduceOp::sum}, {{127}, {1}})[0], -128);
  EXPECT_EQ(reduce_all<I8>(kernels, {.op = ReduceOp::avg, .divide_by = 2}, {{-3}, {-4}})[0], -3);
  EXPECT_EQ(reduce_all<I8>(kernels, {.op = ReduceOp::avg, .divide_by = 300}, {{100}, {27}})[0], 0);
  EXPECT_EQ(reduce_all<std::int64_t>(kernels, {.op = ReduceOp::premultiplied(-0x1p63)}, {{3}, {0}})[0],
            std::numeric_limits<std::int64_t>::min());
}

TEST(Reduce, SourcesAreAddedInOrder) {
  expect_everywhere<float>({.op = ReduceOp::sum}, {1e8f, 1, -1e8f}, 0);
  expect_everywhere<float>({.op = ReduceOp::sum}, {1e8f, -1e8f, 1}, 1);
}

TEST(Reduce, EmptyReductionsWriteNothing) {
  const void* source = nullptr;
  void* destination = nullptr;
  reduce({.dtype = DType::float32, .op = ReduceOp::sum}, {&source, 1}, {&destination, 1}, 0);
}

TEST(Reduce, InstructionSetIsTheFirstSupported) {
  EXPECT_EQ(reduce_instruction_set(), supported_reduce_kernels().front()->name);
  EXPECT_EQ(supported_reduce_kernels().back(), &baseline_reduce_kernels());
}

std::string error_of(DType dtype, ReduceOp op) {
  try {
    require_reducible(dtype, op);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(RequireReducible, AllowsMeaningfulCombinations) {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    const bool floating = to_string(dtype).find("float") != std::string_view::npos;
    for (int k = 0; k < ReduceOp::kKindCount; ++k) {
      const auto kind = static_cast<ReduceOp::Kind>(k);
      const bool bitwise = kind == ReduceOp::band || kind == ReduceOp::bor || kind == ReduceOp::bxor;
      const bool scaling = kind == ReduceOp::avg || kind == ReduceOp::premul_sum;
      const bool allowed = !(floating && bitwise) && !(dtype == DType::bool8 && scaling);
      EXPECT_EQ(error_of(dtype, kind).empty(), allowed) << to_string(dtype) << " " << to_string(kind);
    }
  }
}

TEST(RequireReducible, ErrorsNameAlternatives) {
  EXPECT_EQ(error_of(DType::float32, ReduceOp::band),
            "band has no meaning for float32; use sum, avg, product, min, max or premul_sum");
  EXPECT_EQ(error_of(DType::bool8, ReduceOp::avg),
            "avg has no meaning for bool8; use sum, product, min, max, band, bor or bxor");
}

TEST(RequireReducible, IntegersNeedAWholeFactor) {
  EXPECT_EQ(error_of(DType::int32, ReduceOp::premultiplied(0.5)),
            "premul_sum by 0.5 on int32: the factor for integers must be a whole number of 64 bits");
  for (const double factor : {0x1p63, -0x1.1p63, double{NAN}, double{INFINITY}}) {
    EXPECT_NE(error_of(DType::int64, ReduceOp::premultiplied(factor)), "") << factor;
    EXPECT_EQ(error_of(DType::float16, ReduceOp::premultiplied(factor)), "") << factor;
  }
  EXPECT_EQ(error_of(DType::uint8, ReduceOp::premultiplied(-3)), "");
}

TEST(RequireReducible, ReduceItselfRefusesToo) {
  float value = 1;
  const void* sources[] = {&value, &value};
  void* destination = &value;
  EXPECT_THROW(reduce({.dtype = DType::float32, .op = ReduceOp::bxor}, sources, {&destination, 1}, 1), InvalidArgument);
  EXPECT_THROW(reduce({.dtype = DType::int32, .op = ReduceOp::premultiplied(1.5)}, sources, {&destination, 1}, 1),
               InvalidArgument);
}

}  // namespace
}  // namespace maniple
