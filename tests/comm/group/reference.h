// Naive reductions to compare with: one element after the other, in the order of ranks.
//
// The inputs are small integers, chosen so that no sum, product or multiple of them rounds even in bfloat16 (8 bits):
// then there is one right answer, whatever the order of additions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "comm/group/pattern.h"

namespace maniple::harness {

inline constexpr double kFloatFactor = 0.5;  // of premultiplied sums
inline constexpr double kIntegerFactor = 3;

inline ReduceOp make_op(ReduceOp::Kind kind, DType dtype) {
  if (kind != ReduceOp::premul_sum) return kind;
  const bool floating =
      dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
  return ReduceOp::premultiplied(floating ? kFloatFactor : kIntegerFactor);
}

/// What rank `rank` puts in at index i.
template <class T>
T element(ReduceOp::Kind kind, int rank, std::size_t i) {
  const auto r = static_cast<std::uint64_t>(rank);
  constexpr bool kSigned = !std::is_same_v<T, std::uint8_t>;
  if constexpr (std::is_same_v<T, bool>) {
    // Mostly true for "and", mostly false for "or": so that both results occur.
    const bool rare = (r * 5 + i) % 11 == 0;
    return kind == ReduceOp::product || kind == ReduceOp::min || kind == ReduceOp::band ? !rare : rare;
  } else {
    switch (kind) {
      case ReduceOp::product: {
        const double sign = kSigned && (r + i) % 7 == 0 ? -1 : 1;
        return narrow<T>(sign * ((r + i) % 4 == 0 ? 2 : 1));
      }
      case ReduceOp::min:
      case ReduceOp::max: return narrow<T>(static_cast<double>((r * 31 + i * 17) % 101) - (kSigned ? 50 : 0));
      case ReduceOp::band:
      case ReduceOp::bor:
      case ReduceOp::bxor:
        if constexpr (std::is_integral_v<T>) {
          const std::uint64_t mixed = (r * 0x9e3779b97f4a7c15ULL + i + 1) * 0xbf58476d1ce4e5b9ULL;
          return static_cast<T>(mixed >> 17);
        } else {
          return T{};
        }
      default: return narrow<T>(static_cast<double>((r * 7 + i * 3) % 5) - (kSigned ? 2 : 0));
    }
  }
}

template <class T>
T reduced(ReduceOp op, int ranks, std::size_t i) {
  const ReduceOp::Kind kind = op.kind();
  if constexpr (std::is_same_v<T, bool>) {
    bool result = element<T>(kind, 0, i);
    for (int rank = 1; rank < ranks; ++rank) {
      const bool next = element<T>(kind, rank, i);
      if (kind == ReduceOp::sum || kind == ReduceOp::max || kind == ReduceOp::bor) result = result || next;
      if (kind == ReduceOp::product || kind == ReduceOp::min || kind == ReduceOp::band) result = result && next;
      if (kind == ReduceOp::bxor) result = result != next;
    }
    return result;
  } else {
    // Every intermediate value is a whole number or a half below 2^53; bits are handled as integers.
    double value = widen(element<T>(kind, 0, i));
    auto bits = static_cast<std::int64_t>(value);
    if constexpr (std::is_integral_v<T>) bits = element<T>(kind, 0, i);
    if (kind == ReduceOp::premul_sum) value *= op.factor();
    for (int rank = 1; rank < ranks; ++rank) {
      const T own = element<T>(kind, rank, i);
      const double next = widen(own);
      switch (kind) {
        case ReduceOp::sum:
        case ReduceOp::avg: value += next; break;
        case ReduceOp::premul_sum: value += op.factor() * next; break;
        case ReduceOp::product: value *= next; break;
        case ReduceOp::min: value = std::min(value, next); break;
        case ReduceOp::max: value = std::max(value, next); break;
        default: break;
      }
      if constexpr (std::is_integral_v<T>) {
        if (kind == ReduceOp::band) bits &= own;
        if (kind == ReduceOp::bor) bits |= own;
        if (kind == ReduceOp::bxor) bits ^= own;
      }
    }
    if (kind == ReduceOp::band || kind == ReduceOp::bor || kind == ReduceOp::bxor) return static_cast<T>(bits);
    if (kind == ReduceOp::avg) {
      // Towards zero for integers (as narrow does); rounded once, from float32, for the 16-bit types.
      if constexpr (std::is_same_v<T, double> || std::is_integral_v<T>) return narrow<T>(value / ranks);
      return narrow<T>(static_cast<float>(value) / static_cast<float>(ranks));
    }
    return narrow<T>(value);
  }
}

inline const Pattern& input_of(DType dtype, ReduceOp op, int rank) {
  static Pattern::Remembered<std::tuple<DType, ReduceOp::Kind, int>> all;
  return all.get({dtype, op.kind(), rank}, [&] {
    return with_element_type(dtype, [&]<class T>(std::type_identity<T>) {
      return Pattern::of<T>([&](std::size_t i) { return element<T>(op.kind(), rank, i); });
    });
  });
}

inline const Pattern& result_of(DType dtype, ReduceOp op, int ranks) {
  static Pattern::Remembered<std::tuple<DType, ReduceOp::Kind, double, int>> all;
  return all.get({dtype, op.kind(), op.kind() == ReduceOp::premul_sum ? op.factor() : 1, ranks}, [&] {
    return with_element_type(dtype, [&]<class T>(std::type_identity<T>) {
      return Pattern::of<T>([&](std::size_t i) { return reduced<T>(op, ranks, i); });
    });
  });
}

}  // namespace maniple::harness
