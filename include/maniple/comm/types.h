// Element types, reductions and buffers: the arguments of operations.
//
//   std::vector<float> x(1000);
//   group->all_reduce(buffer_of(x), ReduceOp::max);
//
// A buffer is a view: pointer, number of elements, element type, and device. It owns nothing; the memory must stay
// valid until the operation has finished (for asynchronous calls: until the `Work` is done). A buffer of zero elements
// may have any pointer, including null. Any alignment works; 64 bytes is fastest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

enum class DType : std::uint8_t {
  int8,
  int16,
  int32,
  int64,
  uint8,
  float16,   ///< IEEE half; sums are taken in float32
  bfloat16,  ///< sums are taken in float32
  float32,
  float64,
  bool8,  ///< one byte; 0 is false, any other value is true
};
inline constexpr int kDTypeCount = 10;

/// Bytes per element.
constexpr std::size_t size_of(DType dtype) noexcept {
  constexpr std::size_t kSizes[kDTypeCount] = {1, 2, 4, 8, 1, 2, 2, 4, 8, 1};
  return kSizes[static_cast<std::size_t>(dtype)];
}

std::string_view to_string(DType dtype) noexcept;  ///< "float32"; "unknown" for a number outside the enumeration
DType parse_dtype(std::string_view name);          ///< throws InvalidArgument, listing the names

/// Two bytes with the bits of an IEEE half, for programs without their own half type.
struct float16 {
  std::uint16_t bits = 0;
  float16() = default;
  explicit float16(float value) noexcept;
  explicit operator float() const noexcept;
};

/// Two bytes: the upper half of a float32.
struct bfloat16 {
  std::uint16_t bits = 0;
  bfloat16() = default;
  explicit bfloat16(float value) noexcept;
  explicit operator float() const noexcept;
};

template <class T>
constexpr DType dtype_of() noexcept {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, bool>) {
    return DType::bool8;
  } else if constexpr (std::is_same_v<U, float>) {
    return DType::float32;
  } else if constexpr (std::is_same_v<U, double>) {
    return DType::float64;
  } else if constexpr (std::is_same_v<U, float16>) {
    return DType::float16;
  } else if constexpr (std::is_same_v<U, bfloat16>) {
    return DType::bfloat16;
  } else if constexpr (std::is_same_v<U, std::byte> ||
                       (std::is_integral_v<U> && sizeof(U) == 1 && std::is_unsigned_v<U>)) {
    return DType::uint8;
  } else {
    static_assert(std::is_integral_v<U> && std::is_signed_v<U>, "Maniple has no dtype for this C++ type");
    if constexpr (sizeof(U) == 1) return DType::int8;
    if constexpr (sizeof(U) == 2) return DType::int16;
    if constexpr (sizeof(U) == 4) return DType::int32;
    if constexpr (sizeof(U) == 8) return DType::int64;
  }
}

/// How the elements of several ranks are combined. The order of the operands is fixed by rank, so the same inputs give
/// the same bits on every rank and in every run.
///
///   sum, product     integers wrap around; float16 and bfloat16 are accumulated in float32 and rounded once
///   avg              sum / number of ranks; integers divide towards zero
///   min, max         NaN wins, so that it is not lost
///   band, bor, bxor  integers and bool8 only
///   premultiplied    sum of factor * x; on integers the factor must be a whole number
///
/// On bool8, sum and max are "or", product and min are "and"; avg and premultiplied are not supported.
class ReduceOp {
 public:
  enum Kind : std::uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum };
  static constexpr int kKindCount = 9;

  constexpr ReduceOp(Kind kind = sum) noexcept : kind_(kind) {}  // NOLINT: ReduceOp::sum is meant to convert
  static constexpr ReduceOp premultiplied(double factor) noexcept {
    ReduceOp op(premul_sum);
    op.factor_ = factor;
    return op;
  }

  constexpr Kind kind() const noexcept { return kind_; }
  constexpr double factor() const noexcept { return factor_; }
  friend constexpr bool operator==(const ReduceOp&, const ReduceOp&) = default;

 private:
  Kind kind_;
  double factor_ = 1.0;
};

std::string_view to_string(ReduceOp::Kind kind) noexcept;  ///< "sum"
ReduceOp::Kind parse_reduce_op(std::string_view name);     ///< throws InvalidArgument, listing the names

/// The kind of memory.
enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  std::int16_t index = 0;  ///< as this process counts GPUs (CUDA_VISIBLE_DEVICES selects the visible ones)

  static constexpr Device cuda(int index) noexcept { return {DeviceType::cuda, static_cast<std::int16_t>(index)}; }
  constexpr bool is_cpu() const noexcept { return type == DeviceType::cpu; }
  friend constexpr bool operator==(const Device&, const Device&) = default;
};
std::string to_string(Device device);  ///< "cpu", "cuda:0"

struct ConstBuffer {
  const void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::uint8;
  Device device = {};
  std::size_t bytes() const noexcept { return count * size_of(dtype); }
};

struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::uint8;
  Device device = {};
  std::size_t bytes() const noexcept { return count * size_of(dtype); }
  operator ConstBuffer() const noexcept { return {data, count, dtype, device}; }  // NOLINT: a view of a view
};

/// A view of a contiguous range: `buffer_of(vector)`, `buffer_of(array)`, `buffer_of(span)`.
template <class Range>
  requires requires(Range& r) { std::span(r); }
auto buffer_of(Range&& range) noexcept {
  auto span = std::span(range);
  using T = typename decltype(span)::element_type;
  if constexpr (std::is_const_v<T>) {
    return ConstBuffer{span.data(), span.size(), dtype_of<T>()};
  } else {
    return Buffer{span.data(), span.size(), dtype_of<T>()};
  }
}

/// A view of a single number.
template <class T>
  requires(std::is_arithmetic_v<T> || std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>)
auto buffer_of(T& value) noexcept {
  return buffer_of(std::span<T, 1>(&value, 1));
}

/// The operations. Each has one spelling everywhere: API, traces, errors, command line.
enum class Op : std::uint8_t {
  broadcast,
  reduce,
  all_reduce,
  gather,
  all_gather,
  scatter,
  reduce_scatter,
  all_to_all,
  barrier,
  send,
  recv,
  allocate,  ///< of registered memory
};
inline constexpr int kOpCount = 12;
std::string_view to_string(Op op) noexcept;
Op parse_op(std::string_view name);  ///< throws InvalidArgument, listing the names

}  // namespace maniple
