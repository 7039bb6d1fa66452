// The kernel of limit_gpu: the program is C++20, nvcc compiles C++17, and this is what both see.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace maniple::bench {

constexpr int kMostRanks = 8, kMostBlocks = 264, kThreads = 512;  // threads of a block
constexpr int kSteps = 2;  // ranks wait for each other before the sum, and after it

/// What each rank's memory holds behind the data: a number from every block of every rank, for each step.
struct Arrivals {
  unsigned number[kSteps][kMostRanks][kMostBlocks];
};

/// The memory of all ranks, as this one maps it.
struct MappedRanks {
  float4* data[kMostRanks];
  Arrivals* arrivals[kMostRanks];
  int count, self;
};

/// Enqueues the kernel: this rank's slice, from `begin` to `end`, of all ranks' data becomes its sum. `number` is one
/// more than in the call before, and `blocks` the same on all ranks. 1, 2, 4 or 8 ranks.
cudaError_t enqueue_reduce(const MappedRanks& ranks, std::size_t begin, std::size_t end, unsigned number, int blocks,
                           cudaStream_t stream);

}  // namespace maniple::bench
