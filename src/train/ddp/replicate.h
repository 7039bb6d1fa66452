// One rank's tensors to all: parameters and buffers at construction, buffers after every backward.
//
// Tensors without gaps are moved as blocks of memory, in the order of their strides (which are the same on all ranks).
// Large ones are broadcast where they lie; small ones are packed into one piece of registered memory, so that a hundred
// running means cost one operation. Autograd is not notified: running statistics may change between forward and
// backward without harm.
#pragma once

#include <vector>

#include <torch/types.h>

#include <maniple/comm/process_group.h>

namespace maniple {

class Replicator {
 public:
  Replicator(std::shared_ptr<ProcessGroup> group, std::vector<torch::Tensor> tensors);
  bool empty() const noexcept { return tensors_.empty(); }
  /// Collective. The first call allocates.
  void copy_from(int root);

 private:
  void broadcast_packed(const std::vector<torch::Tensor>& small, int root);

  std::shared_ptr<ProcessGroup> group_;
  std::vector<torch::Tensor> tensors_;
  RegisteredMemory pack_;
};

}  // namespace maniple
