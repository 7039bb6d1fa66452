// Which sets of reduction loops this processor can run.
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <array>

#include "collective/reduce/kernels.h"

namespace maniple {
namespace {

#if defined(__x86_64__)
bool has_f16c() noexcept {  // not known to __builtin_cpu_supports of every compiler
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
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
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

}  // namespace

std::span<const ReduceKernels* const> supported_reduce_kernels() noexcept {
  static const Supported supported;
  return {supported.kernels.data(), supported.count};
}

}  // namespace maniple
