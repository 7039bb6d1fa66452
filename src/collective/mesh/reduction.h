// How an operation's reduction is spread over stages that pass partial results on.
#pragma once

#include "call/operation.h"
#include "collective/reduce/reduce.h"

namespace maniple {

/// All operands at once.
inline Reduction whole_reduction(const Operation& operation, int ranks) noexcept {
  return reduction_of(operation, ranks);
}

/// Partial results and operands that are multiplied already.
inline Reduction stage_reduction(const Operation& operation, int ranks, bool last) noexcept {
  Reduction reduction = whole_reduction(operation, ranks);
  reduction.premultiply = false;
  if (!last) reduction.divide_by = 1;
  return reduction;
}

/// Partial results in 16 bits would be rounded at every stage, where the contract is to round once: such operations are
/// left to the algorithms that take all operands at once.
inline bool rounds_partial_results(const Operation& operation) noexcept {
  if (operation.dtype != DType::float16 && operation.dtype != DType::bfloat16) return false;
  const ReduceOp::Kind kind = operation.reduce.kind();
  return kind != ReduceOp::min && kind != ReduceOp::max;
}

}  // namespace maniple
