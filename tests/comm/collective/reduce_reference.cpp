#include "comm/collective/reduce_reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>

namespace maniple::test {
namespace {

struct Truth {
  unsigned char byte = 0;
};

template <class Visit>
auto with_type(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::int8: return visit(std::int8_t{});
    case DType::int16: return visit(std::int16_t{});
    case DType::int32: return visit(std::int32_t{});
    case DType::int64: return visit(std::int64_t{});
    case DType::uint8: return visit(std::uint8_t{});
    case DType::float16: return visit(float16{});
    case DType::bfloat16: return visit(bfloat16{});
    case DType::float32: return visit(float{});
    case DType::float64: return visit(double{});
    case DType::bool8: break;
  }
  return visit(Truth{});
}

template <class T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
constexpr bool kHalf = std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>;

template <class T>
T special(std::uint64_t choice) {
  using Float = std::conditional_t<kHalf<T>, float, T>;
  using Limits = std::numeric_limits<Float>;
  const Float values[] = {Float(0),
                          -Float(0),
                          Limits::infinity(),
                          -Limits::infinity(),
                          Limits::quiet_NaN(),
                          Limits::max(),
                          Limits::denorm_min(),
                          -Limits::min(),
                          Float(65504),
                          Float(6e-8)};
  return T(values[choice % std::size(values)]);
}

template <class T>
T random_element(std::mt19937_64& random) {
  const std::uint64_t bits = random();
  if constexpr (std::is_same_v<T, Truth>) {
    return {static_cast<unsigned char>(bits % 3 == 0 ? 0 : bits >> 8)};
  } else if constexpr (std::is_integral_v<T>) {
    if (bits % 32 == 0) return std::numeric_limits<T>::min();
    if (bits % 32 == 1) return std::numeric_limits<T>::max();
    return static_cast<T>(bits >> 8);
  } else {
    if (bits % 128 == 0) return special<T>(bits >> 8);
    using Float = std::conditional_t<kHalf<T>, float, T>;
    const auto number = static_cast<Float>(static_cast<std::int64_t>(bits) >> 10);  // 54 bits with sign
    const int exponent = bits % 16 == 1 ? static_cast<int>((bits >> 4) % 40) - 20 : 0;
    return T(std::ldexp(number, exponent - 51));
  }
}

std::uint64_t fold_integers(ReduceOp::Kind kind, std::uint64_t a, std::uint64_t b) {
  switch (kind) {
    case ReduceOp::product: return a * b;
    case ReduceOp::band: return a & b;
    case ReduceOp::bor: return a | b;
    case ReduceOp::bxor: return a ^ b;
    default: return a + b;
  }
}

template <class T>
T reduce_integers(const Reduction& reduction, const std::vector<T>& x) {
  const ReduceOp::Kind kind = reduction.op.kind();
  const bool scaled = kind == ReduceOp::premul_sum && reduction.premultiply;
  const auto factor = scaled ? static_cast<std::uint64_t>(static_cast<std::int64_t>(reduction.op.factor())) : 1;
  T result = static_cast<T>(static_cast<std::uint64_t>(x[0]) * factor);
  for (std::size_t s = 1; s < x.size(); ++s) {
    if (kind == ReduceOp::min) {
      result = std::min(result, x[s]);
    } else if (kind == ReduceOp::max) {
      result = std::max(result, x[s]);
    } else {
      const auto next = static_cast<std::uint64_t>(x[s]) * factor;
      result = static_cast<T>(fold_integers(kind, static_cast<std::uint64_t>(result), next));
    }
  }
  return kind == ReduceOp::avg ? static_cast<T>(static_cast<std::int64_t>(result) / reduction.divide_by) : result;
}

template <class T>
T reduce_floats(const Reduction& reduction, const std::vector<T>& x) {
  using Float = std::conditional_t<kHalf<T>, float, T>;
  const ReduceOp::Kind kind = reduction.op.kind();
  const bool scaled = kind == ReduceOp::premul_sum && reduction.premultiply;
  const auto factor = static_cast<Float>(reduction.op.factor());
  const auto operand = [&](std::size_t s) {
    const auto value = static_cast<Float>(x[s]);
    return scaled ? factor * value : value;
  };
  Float result = operand(0);
  for (std::size_t s = 1; s < x.size(); ++s) {
    const Float next = operand(s);
    switch (kind) {
      case ReduceOp::product: result = result * next; break;
      case ReduceOp::min: result = std::isnan(result) || result < next ? result : next; break;
      case ReduceOp::max: result = std::isnan(result) || result > next ? result : next; break;
      default: result = result + next; break;
    }
  }
  return T(kind == ReduceOp::avg ? result / static_cast<Float>(reduction.divide_by) : result);
}

Truth reduce_truth(const Reduction& reduction, const std::vector<Truth>& x) {
  bool result = x[0].byte != 0;
  for (std::size_t s = 1; s < x.size(); ++s) {
    const bool next = x[s].byte != 0;
    switch (reduction.op.kind()) {
      case ReduceOp::product:
      case ReduceOp::min:
      case ReduceOp::band: result = result && next; break;
      case ReduceOp::bxor: result = result != next; break;
      default: result = result || next; break;
    }
  }
  return {static_cast<unsigned char>(result ? 1 : 0)};
}

}  // namespace

Bytes random_elements(DType dtype, std::size_t count, std::uint64_t seed) {
  Bytes bytes(count * size_of(dtype));
  std::mt19937_64 random(seed);
  with_type(dtype, [&](auto type) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto element = random_element<decltype(type)>(random);
      std::memcpy(bytes.data() + i * sizeof element, &element, sizeof element);
    }
  });
  return bytes;
}

Bytes reference_reduction(const Reduction& reduction, const std::vector<Bytes>& sources, std::size_t count) {
  Bytes result(count * size_of(reduction.dtype));
  with_type(reduction.dtype, [&](auto type) {
    using T = decltype(type);
    std::vector<T> operands(sources.size());
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t s = 0; s < sources.size(); ++s) operands[s] = load<T>(sources[s].data() + i * sizeof(T));
      T element;
      if constexpr (std::is_same_v<T, Truth>) {
        element = reduce_truth(reduction, operands);
      } else if constexpr (std::is_integral_v<T>) {
        element = reduce_integers(reduction, operands);
      } else {
        element = reduce_floats(reduction, operands);
      }
      std::memcpy(result.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return result;
}

bool same_element(DType dtype, const void* a, const void* b) {
  if (std::memcmp(a, b, size_of(dtype)) == 0) return true;
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (kHalf<T> || std::is_floating_point_v<T>) {
      return std::isnan(static_cast<double>(static_cast<std::conditional_t<kHalf<T>, float, T>>(load<T>(a)))) &&
             std::isnan(static_cast<double>(static_cast<std::conditional_t<kHalf<T>, float, T>>(load<T>(b))));
    } else {
      return false;
    }
  });
}

std::string show_element(DType dtype, const void* element) {
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const T value = load<T>(element);
    if constexpr (std::is_same_v<T, Truth>) {
      return fmt::format("byte {}", value.byte);
    } else if constexpr (std::is_integral_v<T>) {
      return fmt::format("{}", static_cast<std::int64_t>(value));
    } else if constexpr (kHalf<T>) {
      return fmt::format("{} (bits {:04x})", static_cast<float>(value), value.bits);
    } else {
      return fmt::format("{} ({:a})", value, value);
    }
  });
}

}  // namespace maniple::test
