#include <maniple/comm/types.h>

#include <array>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "comm/base/half.h"
#include <maniple/comm/options.h>
#include <maniple/version.h>

namespace maniple {
namespace {

constexpr std::array<std::string_view, kDTypeCount> kDTypes = {"int8",    "int16",    "int32",   "int64",   "uint8",
                                                               "float16", "bfloat16", "float32", "float64", "bool8"};
constexpr std::array<std::string_view, ReduceOp::kKindCount> kReduceOps = {"sum",  "avg", "product", "min",       "max",
                                                                           "band", "bor", "bxor",    "premul_sum"};
constexpr std::array<std::string_view, kOpCount> kOps = {"broadcast",  "reduce",  "all_reduce",     "gather",
                                                         "all_gather", "scatter", "reduce_scatter", "all_to_all",
                                                         "barrier",    "send",    "recv",           "allocate"};
constexpr std::array<std::string_view, 4> kTransports = {"auto", "loopback", "shm", "tcp"};

template <class Enum, std::size_t N>
Enum parse(const std::array<std::string_view, N>& names, std::string_view name, std::string_view what) {
  for (std::size_t i = 0; i < N; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  throw InvalidArgument(fmt::format("unknown {} \"{}\"; expected one of {}", what, name, fmt::join(names, ", ")));
}

// The index may be out of range: any number can be cast to the enumeration.
template <class Enum, std::size_t N>
std::string_view name_at(const std::array<std::string_view, N>& names, Enum value) noexcept {
  const auto index = static_cast<std::size_t>(value);
  return index < N ? names[index] : "unknown";
}

}  // namespace

std::string_view to_string(DType dtype) noexcept { return name_at(kDTypes, dtype); }
std::string to_string(Device device) {
  return device.is_cpu() ? std::string("cpu") : "cuda:" + std::to_string(device.index);
}
std::string_view to_string(ReduceOp::Kind kind) noexcept { return name_at(kReduceOps, kind); }
std::string_view to_string(Op op) noexcept { return name_at(kOps, op); }
std::string_view to_string(TransportKind kind) noexcept { return name_at(kTransports, kind); }

DType parse_dtype(std::string_view name) { return parse<DType>(kDTypes, name, "dtype"); }
ReduceOp::Kind parse_reduce_op(std::string_view name) { return parse<ReduceOp::Kind>(kReduceOps, name, "reduce op"); }
Op parse_op(std::string_view name) { return parse<Op>(kOps, name, "operation"); }
TransportKind parse_transport(std::string_view name) { return parse<TransportKind>(kTransports, name, "transport"); }

float16::float16(float value) noexcept : bits(half::float16_from_float(value)) {}
float16::operator float() const noexcept { return half::float_from_float16(bits); }

bfloat16::bfloat16(float value) noexcept : bits(half::bfloat16_from_float(value)) {}
bfloat16::operator float() const noexcept { return half::float_from_bfloat16(bits); }

const char* version() noexcept { return MANIPLE_VERSION_STRING; }

}  // namespace maniple
