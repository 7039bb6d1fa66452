// NEON with half-precision arithmetic (FEAT_FP16): the baseline, except for the float16 sum of two sources.
//
// Converting to float32 and back costs more than the memory traffic here. Two operands do not need it: float32 has 24
// bits, at least twice float16's 11 plus 2, so rounding a sum first to 24 bits and then to 11 equals rounding it once.
// That does not hold for three operands. Compiled only for aarch64, with its own compiler flags.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/base/half.h"
#include "comm/collective/reduce/kernels.h"

namespace maniple {
namespace {

constexpr int kVectorBytes = 16;
#include "comm/collective/reduce/kernels.inl"

struct NativeFloat16 : Float16 {
  static constexpr std::size_t kVectorStep = kVectorBytes;
  using Lanes = float16x8_t;
  using Vector = Lanes;
  static Vector load(const std::byte* from) { return load_bytes<Vector>(from); }
  static void store(std::byte* to, const Vector& value) { store_bytes(to, value); }
};

void sum_float16(const ReduceArguments& a) {
  if (a.source_count == 2) {
    sum_two<NativeFloat16>(a);
  } else {
    run<Float16, Add>(a);
  }
}

}  // namespace

const ReduceKernels& fp16_reduce_kernels() noexcept {
  static const ReduceKernels kernels = [] {
    ReduceKernels changed_baseline = baseline_reduce_kernels();
    changed_baseline.name = "neon-fp16";
    changed_baseline.table[static_cast<int>(DType::float16)][ReduceOp::sum] = sum_float16;
    return changed_baseline;
  }();
  return kernels;
}

}  // namespace maniple
