// ShardOf: the part of a large tensor held by this rank, and its position in the whole tensor.
//
// Divided data (the state of a ShardedOptimizer, fully sharded parameters) describes itself as a list of ShardOf. Code
// that saves or loads checkpoints needs nothing else: every rank writes its parts, and any other number of ranks
// locates its bytes by name and offset.
//
// The whole tensor is treated as a flat row of its elements, in the order of a contiguous tensor (C order). Together
// the ranks' parts of one name cover the whole tensor. They may overlap only where they are equal (replicas).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/types.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct ShardOf {
  std::string name = {};                 ///< name of the whole tensor; the same on all ranks that hold a part of it
  std::vector<std::int64_t> shape = {};  ///< shape of the whole tensor; empty: one element
  std::int64_t offset = 0;               ///< index of the first element held here, in the flat tensor
  std::int64_t count = 0;                ///< number of elements held here; 0: none
  torch::Tensor local =
      {};  ///< these elements: contiguous, `count` of them, in the dtype of the whole. The tensor itself, not a copy
};

}  // namespace maniple
