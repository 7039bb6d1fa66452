// ShardOf: the part of a large tensor that this rank holds, and where it belongs in the whole.
//
// What is divided over ranks (the state of a ShardedOptimizer, parameters that are fully sharded) describes itself as a
// list of these, and what writes or reads checkpoints needs nothing else: every rank writes its parts, and ranks of any
// other number find by name and offset which bytes are theirs.
//
// The whole is seen as a flat row of its elements, in the order of a contiguous tensor (C order). The parts of one name
// that the ranks of a job hold may overlap only where they are equal (replicas), and together they are the whole.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/types.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct ShardOf {
  std::string name = {};                 ///< of the whole tensor; the same on all ranks that hold a part of it
  std::vector<std::int64_t> shape = {};  ///< of the whole tensor; empty: one element
  std::int64_t offset = 0;               ///< the first element held here, counted in the flat whole
  std::int64_t count = 0;                ///< how many elements from there on are held here; 0: none
  torch::Tensor local =
      {};  ///< those elements: contiguous, `count` of them, in the dtype of the whole. The tensor itself, not a copy
};

}  // namespace maniple
