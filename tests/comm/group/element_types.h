// From a dtype, known at run time, to the C++ type of its elements.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include <maniple/comm/types.h>

namespace maniple::harness {

inline constexpr std::array<DType, kDTypeCount> kAllDTypes = {
    DType::int8,    DType::int16,    DType::int32,   DType::int64,   DType::uint8,
    DType::float16, DType::bfloat16, DType::float32, DType::float64, DType::bool8};

/// Calls visit(std::type_identity<T>{}) with the element type.
template <class Visit>
auto with_element_type(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::int8: return visit(std::type_identity<std::int8_t>{});
    case DType::int16: return visit(std::type_identity<std::int16_t>{});
    case DType::int32: return visit(std::type_identity<std::int32_t>{});
    case DType::int64: return visit(std::type_identity<std::int64_t>{});
    case DType::uint8: return visit(std::type_identity<std::uint8_t>{});
    case DType::float16: return visit(std::type_identity<float16>{});
    case DType::bfloat16: return visit(std::type_identity<bfloat16>{});
    case DType::float32: return visit(std::type_identity<float>{});
    case DType::float64: return visit(std::type_identity<double>{});
    case DType::bool8: break;
  }
  return visit(std::type_identity<bool>{});
}

template <class T>
T narrow(double value) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    return static_cast<T>(static_cast<std::int64_t>(value));
  } else if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
double widen(T value) {
  if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
    return static_cast<float>(value);
  } else {
    return static_cast<double>(value);
  }
}

/// Whether the reduction has a meaning for the dtype.
inline bool applies(ReduceOp::Kind op, DType dtype) {
  const bool bits = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  const bool floating =
      dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
  if (bits) return !floating;
  if (dtype == DType::bool8) return op != ReduceOp::avg && op != ReduceOp::premul_sum;
  return true;
}

}  // namespace maniple::harness
