// The interface between limit_gpu (C++20) and its kernel, which nvcc compiles as C++17.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace maniple::bench {

constexpr int kMostRanks = 8, kMaxBlocks = 264, kThreads = 512;  // threads per block
constexpr int kSteps = 2;                                        // ranks wait for each other before and after the sum

/// Follows the data in each rank's memory: a number from every block of every rank, for each step.
struct Arrivals {
  unsigned number[kSteps][kMostRanks][kMaxBlocks];
};

/// All ranks' memory, as mapped by this rank.
struct MappedRanks {
  float4* data[kMostRanks];
  Arrivals* arrivals[kMostRanks];
  int count, self;
};

/// Enqueues the kernel, which replaces this rank's slice [begin, end) of all ranks' data by the sum over the ranks.
/// `number` is one more than in the previous call; `blocks` is the same on all ranks. For 1, 2, 4 or 8 ranks.
cudaError_t enqueue_reduce(const MappedRanks& ranks, std::size_t begin, std::size_t end, unsigned number, int blocks,
                           cudaStream_t stream);

}  // namespace maniple::bench
