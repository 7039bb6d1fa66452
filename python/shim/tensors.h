// Tensors as memory for operations: one contiguous piece in one of Maniple's dtypes.
#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <maniple/c.h>

namespace maniple_torch {

/// One or more consecutive tensors as one contiguous piece of memory: the tensors' own memory if possible, otherwise a
/// copy.
struct Memory {
  at::Tensor flat;                  ///< contiguous
  std::vector<at::Tensor> tensors;  ///< the tensors it represents; may be empty
  bool own = true;                  ///< `flat` is the tensors' own memory
  maniple_buffer buffer{};
  std::vector<std::size_t> counts;  ///< elements of `buffer` per tensor
  bool equal = true;                ///< all counts are the same

  const std::size_t* counts_if_unequal() const { return equal ? nullptr : counts.data(); }
  /// If `flat` is a copy, copies its values to the tensors.
  void copy_back() const;
};

enum class Use { in, out, in_out };

/// `op` names the operation in messages. Refuses tensors that are not dense or are on a device that this module does
/// not support.
Memory memory_of(const char* op, const at::Tensor& tensor, Use use);
/// All must have one dtype.
Memory memory_of(const char* op, const std::vector<at::Tensor>& tensors, Use use);
/// The number of the GPU, or -1 for the CPU. Refuses other devices.
int require_served(const char* op, const at::Device& device);
/// Empty memory with the same dtype as `other`.
Memory nothing_like(const Memory& other);

/// The reduction for the tensor's dtype. Refuses reductions that are undefined for it.
maniple_reduce_op reduce_op_of(const char* op, const c10d::ReduceOp& reduce_op, const at::Tensor& tensor);

/// The only element of a list that torch.distributed passes; refuses lists of another length.
const at::Tensor& only(const char* op, const std::vector<at::Tensor>& tensors);
const std::vector<at::Tensor>& only(const char* op, const std::vector<std::vector<at::Tensor>>& lists);

}  // namespace maniple_torch
