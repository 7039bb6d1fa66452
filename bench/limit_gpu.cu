#include "bench/limit_gpu.h"

#include <cuda/atomic>

namespace maniple::bench {
namespace {

/// Block b waits for block b of every other rank.
__device__ void meet(const MappedRanks& ranks, int step, unsigned number) {
  using Word = cuda::atomic_ref<unsigned, cuda::thread_scope_system>;
  __syncthreads();
  if (threadIdx.x < ranks.count) {
    const int other = static_cast<int>(threadIdx.x);
    __threadfence_system();
    Word(ranks.arrivals[other]->number[step][ranks.self][blockIdx.x]).store(number, cuda::memory_order_release);
    const Word awaited(ranks.arrivals[ranks.self]->number[step][other][blockIdx.x]);
    while (awaited.load(cuda::memory_order_acquire) != number) {
    }
  }
  __syncthreads();
}

/// This rank's slice, from `begin` to `end`, of all ranks' data becomes its sum.
template <int kRanks>
__global__ void reduce(MappedRanks ranks, std::size_t begin, std::size_t end, unsigned number) {
  meet(ranks, 0, number);
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = begin + static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < end; i += stride) {
    float4 parts[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) parts[r] = ranks.data[r][i];
    float4 total = parts[0];
#pragma unroll
    for (int r = 1; r < kRanks; ++r) {
      total.x += parts[r].x;
      total.y += parts[r].y;
      total.z += parts[r].z;
      total.w += parts[r].w;
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) ranks.data[r][i] = total;
  }
  meet(ranks, 1, number);
}

}  // namespace

cudaError_t enqueue_reduce(const MappedRanks& ranks, std::size_t begin, std::size_t end, unsigned number, int blocks,
                           cudaStream_t stream) {
  switch (ranks.count) {
    case 1: reduce<1><<<blocks, kThreads, 0, stream>>>(ranks, begin, end, number); break;
    case 2: reduce<2><<<blocks, kThreads, 0, stream>>>(ranks, begin, end, number); break;
    case 4: reduce<4><<<blocks, kThreads, 0, stream>>>(ranks, begin, end, number); break;
    default: reduce<8><<<blocks, kThreads, 0, stream>>>(ranks, begin, end, number); break;
  }
  return cudaGetLastError();
}

}  // namespace maniple::bench
