// The reduction loops, one set for each instruction set in this build. Internal to reduce.cpp and its tests.
//
// Every set compiles the same source, kernels.inl, with different flags and yields bit-identical results: no
// contraction to fused multiply-add, no reordering of operands. (Which of two NaNs survives may differ.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/collective/reduce/reduce.h"
#include <maniple/comm/types.h>

namespace maniple {

struct ReduceArguments {
  const void* const* sources = nullptr;
  std::size_t source_count = 0;
  void* const* destinations = nullptr;
  std::size_t destination_count = 0;
  std::size_t count = 0;  ///< elements
  double factor = 1;      ///< for premul_sum
  int divide_by = 1;      ///< for avg
};

using ReduceKernel = void (*)(const ReduceArguments&);

struct ReduceKernels {
  const char* name = "";
  ReduceKernel table[kDTypeCount][ReduceOp::kKindCount] = {};  ///< null if the op is undefined for the dtype
};

const ReduceKernels& baseline_reduce_kernels() noexcept;
const ReduceKernels& fp16_reduce_kernels() noexcept;    ///< aarch64 only
const ReduceKernels& avx2_reduce_kernels() noexcept;    ///< x86-64 only
const ReduceKernels& avx512_reduce_kernels() noexcept;  ///< x86-64 only

/// The sets that this processor can run, fastest first.
std::span<const ReduceKernels* const> supported_reduce_kernels() noexcept;

/// Like `reduce`, with the given kernel set.
void reduce_with(const ReduceKernels& kernels, const Reduction& reduction, std::span<const void* const> sources,
                 std::span<void* const> destinations, std::size_t count);

}  // namespace maniple
