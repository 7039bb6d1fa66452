// Operations on GPU tensors. A call enqueues the operation on the group's own stream, after the current stream's work.
// Work.wait() makes the current stream wait for the operation while the host goes on, as with PyTorch's NCCL.
//
// Only device.cpp uses PyTorch's CUDA. Without it (MANIPLE_TORCH_CUDA is not defined), GPU tensors do not exist.
#pragma once

#include <memory>

#include "work.h"

namespace maniple_torch {

bool built_for_cuda();

/// Calls an operation whose tensors are on a GPU; collectives keep the order of calls. It is enqueued on return.
c10::intrusive_ptr<c10d::Work> run_on_gpu(const std::shared_ptr<Engine>& engine, int rank, c10d::OpType type,
                                          const char* title, at::Device device, Operation operation);

/// Blocks the host until the current stream of that GPU is empty.
void drain_current_stream(int index);

}  // namespace maniple_torch
