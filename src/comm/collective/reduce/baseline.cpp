// Kernels that every processor of the architecture can run.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/base/half.h"
#include "comm/collective/reduce/kernels.h"

namespace maniple {
namespace {

constexpr int kVectorBytes = 16;
#include "comm/collective/reduce/kernels.inl"

#if defined(__aarch64__)
constexpr ReduceKernels kKernels = make_kernels("neon");
#elif defined(__x86_64__)
constexpr ReduceKernels kKernels = make_kernels("sse2");
#else
constexpr ReduceKernels kKernels = make_kernels("generic");
#endif

}  // namespace

const ReduceKernels& baseline_reduce_kernels() noexcept { return kKernels; }

}  // namespace maniple
