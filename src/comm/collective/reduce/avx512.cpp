// AVX-512 F, BW, DQ and VL. Compiled only for x86-64, with its own compiler flags.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/base/half.h"
#include "comm/collective/reduce/kernels.h"

namespace maniple {
namespace {

constexpr int kVectorBytes = 64;
#include "comm/collective/reduce/kernels.inl"

constexpr ReduceKernels kKernels = make_kernels("avx512");

}  // namespace

const ReduceKernels& avx512_reduce_kernels() noexcept { return kKernels; }

}  // namespace maniple
