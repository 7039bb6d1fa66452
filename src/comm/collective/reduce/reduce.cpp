#include "comm/collective/reduce/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <array>
#include <cmath>
#include <cstring>

#include "comm/base/check.h"
#include "comm/collective/reduce/kernels.h"

namespace maniple {
namespace {

bool is_floating(DType dtype) noexcept {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

/// The op of this stage: an average that does not divide yet, or a premul_sum whose factor was applied earlier, is a
/// plain sum.
ReduceOp::Kind kind_of_stage(const Reduction& reduction) noexcept {
  const ReduceOp::Kind kind = reduction.op.kind();
  if (kind == ReduceOp::avg && reduction.divide_by == 1) return ReduceOp::sum;
  if (kind == ReduceOp::premul_sum && !reduction.premultiply) return ReduceOp::sum;
  return kind;
}

/// Whether a single source is copied unchanged, bit for bit.
bool is_copy(DType dtype, ReduceOp::Kind kind) noexcept {
  return dtype != DType::bool8 && kind != ReduceOp::avg && kind != ReduceOp::premul_sum;
}

// The sets of kernels that this processor can run, fastest first.
#if defined(__x86_64__)
bool has_f16c() noexcept {  // some compilers' __builtin_cpu_supports lacks F16C
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

struct Supported {
  std::array<const ReduceKernels*, 3> kernels{};
  std::size_t count = 0;

  Supported() noexcept {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      kernels[count++] = &avx512_reduce_kernels();
    }
    if (__builtin_cpu_supports("avx2") && has_f16c()) kernels[count++] = &avx2_reduce_kernels();
#elif defined(__aarch64__)
    constexpr unsigned long kHalfPrecisionVectors = 1UL << 10;  // HWCAP_ASIMDHP
    if ((::getauxval(AT_HWCAP) & kHalfPrecisionVectors) != 0) kernels[count++] = &fp16_reduce_kernels();
#endif
    kernels[count++] = &baseline_reduce_kernels();
  }
};

const ReduceKernels& best_kernels() noexcept {
  static const ReduceKernels& kernels = *supported_reduce_kernels().front();
  return kernels;
}

}  // namespace

std::span<const ReduceKernels* const> supported_reduce_kernels() noexcept {
  static const Supported supported;
  return {supported.kernels.data(), supported.count};
}

void reduce_with(const ReduceKernels& kernels, const Reduction& reduction, std::span<const void* const> sources,
                 std::span<void* const> destinations, std::size_t count) {
  MANIPLE_ASSERT(!sources.empty() && !destinations.empty() && reduction.divide_by >= 1);
  const auto* row = kernels.table[static_cast<std::size_t>(reduction.dtype)];
  const ReduceOp::Kind kind = kind_of_stage(reduction);
  if (row[reduction.op.kind()] == nullptr || kind == ReduceOp::premul_sum) [[unlikely]] {
    require_reducible(reduction.dtype, reduction.op);
  }
  if (count == 0) return;
  if (sources.size() == 1 && is_copy(reduction.dtype, kind)) {
    for (void* destination : destinations) {
      if (destination != sources[0]) std::memcpy(destination, sources[0], count * size_of(reduction.dtype));
    }
    return;
  }
  row[kind]({.sources = sources.data(),
             .source_count = sources.size(),
             .destinations = destinations.data(),
             .destination_count = destinations.size(),
             .count = count,
             .factor = reduction.op.factor(),
             .divide_by = reduction.divide_by});
}

void reduce(const Reduction& reduction, std::span<const void* const> sources, std::span<void* const> destinations,
            std::size_t count) {
  reduce_with(best_kernels(), reduction, sources, destinations, count);
}

std::string_view reduce_instruction_set() noexcept { return best_kernels().name; }

void require_dtype(DType dtype) {
  MANIPLE_REQUIRE(static_cast<int>(dtype) < kDTypeCount, "there is no dtype {}; use one of the names in DType",
                  static_cast<int>(dtype));
}

void require_reducible(DType dtype, ReduceOp op) {
  require_dtype(dtype);
  MANIPLE_REQUIRE(op.kind() < ReduceOp::kKindCount,
                  "there is no reduce op {}; use sum, avg, product, min, max, band, bor, bxor or premul_sum",
                  static_cast<int>(op.kind()));
  MANIPLE_REQUIRE(baseline_reduce_kernels().table[static_cast<std::size_t>(dtype)][op.kind()] != nullptr,
                  "{} has no meaning for {}; {}", to_string(op.kind()), to_string(dtype),
                  dtype == DType::bool8 ? "use sum, product, min, max, band, bor or bxor"
                                        : "use sum, avg, product, min, max or premul_sum");
  if (op.kind() != ReduceOp::premul_sum || is_floating(dtype)) return;
  const double factor = op.factor();
  MANIPLE_REQUIRE(std::trunc(factor) == factor && factor >= -0x1p63 && factor < 0x1p63,
                  "premul_sum by {} on {}: the factor for integers must be a whole number of 64 bits", factor,
                  to_string(dtype));
}

}  // namespace maniple
