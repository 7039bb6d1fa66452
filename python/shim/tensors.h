// Tensors as memory for operations: contiguous, one piece, in one of Maniple's dtypes.
#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <maniple/c.h>

namespace maniple_torch {

/// A tensor, or several one after the other, as one contiguous piece of memory: the tensors' own where that is
/// possible, otherwise a copy.
struct Memory {
  at::Tensor flat;                  ///< contiguous
  std::vector<at::Tensor> tensors;  ///< whose values it stands for; empty: nobody's
  bool own = true;                  ///< `flat` is the tensors' memory itself
  maniple_buffer buffer{};
  std::vector<std::size_t> counts;  ///< of elements of `buffer`, for each tensor
  bool equal = true;                ///< all counts are the same

  const std::size_t* counts_if_unequal() const { return equal ? nullptr : counts.data(); }
  /// Copies the values of a copy to the tensors; nothing otherwise.
  void copy_back() const;
};

enum class Use { in, out, in_out };

/// What is given as `op` names the operation in messages. Refuses tensors that are not dense, or on a
/// device that this module does not serve.
Memory memory_of(const char* op, const at::Tensor& tensor, Use use);
/// All must have one dtype.
Memory memory_of(const char* op, const std::vector<at::Tensor>& tensors, Use use);
/// The number of the GPU, or -1 for the CPU. Refuses other devices.
int require_served(const char* op, const at::Device& device);
/// Memory of no elements, of the dtype of another.
Memory nothing_like(const Memory& other);

/// The reduction, for tensors of this dtype. Refuses those that have no meaning for it.
maniple_reduce_op reduce_op_of(const char* op, const c10d::ReduceOp& reduce_op, const at::Tensor& tensor);

/// The only tensor of a list that torch.distributed passes; refuses others.
const at::Tensor& only(const char* op, const std::vector<at::Tensor>& tensors);
const std::vector<at::Tensor>& only(const char* op, const std::vector<std::vector<at::Tensor>>& lists);

}  // namespace maniple_torch
