// Operations on tensors of a GPU. They are enqueued when they are called: after what the current stream holds, on a
// stream of the group's own. Work.wait() makes the current stream wait for them, and the host goes on, as with
// PyTorch's NCCL.
//
// The only file behind which PyTorch's CUDA is seen. Where PyTorch has none (MANIPLE_TORCH_CUDA is not defined), there
// are no such tensors.
#pragma once

#include <memory>

#include "work.h"

namespace maniple_torch {

bool built_for_cuda();

/// Calls an operation whose tensors are on a GPU; a collective after those before it. It is enqueued when this returns.
c10::intrusive_ptr<c10d::Work> run_on_gpu(const std::shared_ptr<Engine>& engine, int rank, c10d::OpType type,
                                          const char* title, at::Device device, Operation operation);

/// Blocks the host until the current stream of that GPU is empty.
void drain_current_stream(int index);

}  // namespace maniple_torch
