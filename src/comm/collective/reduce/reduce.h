// The arithmetic of reductions: several sources, several destinations, one pass.
//
// Operands are combined in the order of `sources`, so the caller fixes the order of additions. float16 and bfloat16 are
// accumulated in float32 and rounded once. NaN propagates through min and max. Integers wrap around.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "comm/call/operation.h"
#include <maniple/comm/types.h>

namespace maniple {

struct Reduction {
  DType dtype = DType::float32;
  ReduceOp op;
  bool premultiply = true;  ///< premul_sum: multiply the sources (the first stage of several does, later ones do not)
  int divide_by = 1;        ///< avg: divide the result (the last stage of several does)
};

/// The arithmetic of an operation among `ranks` ranks, or of one stage of an operation.
inline Reduction reduction_of(const Operation& operation, int ranks) noexcept {
  const bool divides = operation.reduce.kind() == ReduceOp::avg && operation.last_stage;
  return {operation.dtype, operation.reduce, operation.first_stage,
          divides ? (operation.ranks != 0 ? operation.ranks : ranks) : 1};
}

/// The arithmetic of a stage that passes on partial results: its operands are already multiplied, and only the last
/// stage divides.
inline Reduction stage_reduction(const Operation& operation, int ranks, bool last) noexcept {
  Reduction reduction = reduction_of(operation, ranks);
  reduction.premultiply = false;
  if (!last) reduction.divide_by = 1;
  return reduction;
}

/// Whether partial results would be rounded. 16-bit partial results would be rounded at every stage, but the contract
/// is to round once, so these operations need algorithms that combine all operands at once.
inline bool rounds_partial_results(const Operation& operation) noexcept {
  if (operation.dtype != DType::float16 && operation.dtype != DType::bfloat16) return false;
  const ReduceOp::Kind kind = operation.reduce.kind();
  return kind != ReduceOp::min && kind != ReduceOp::max;
}

/// destinations[d][i] = reduction over s of sources[s][i], for i in [0, count). Both lists need at least one entry. A
/// destination may be the same memory as a source; other overlaps are not allowed.
void reduce(const Reduction& reduction, std::span<const void* const> sources, std::span<void* const> destinations,
            std::size_t count);

/// The instruction set that the kernels of this process use: "neon", "neon-fp16", "sse2", "avx2", "avx512" or
/// "generic".
std::string_view reduce_instruction_set() noexcept;

/// Throws InvalidArgument if `dtype` is not an enumerator of DType.
void require_dtype(DType dtype);
/// Throws InvalidArgument if the op is undefined for the dtype (band on float32, avg on bool8, ...), or if either is
/// not an enumerator of its type.
void require_reducible(DType dtype, ReduceOp op);

}  // namespace maniple
