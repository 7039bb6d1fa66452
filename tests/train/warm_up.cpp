// What LibTorch starts when it is first used is there before threads and descriptors are counted: the threads of its
// autograd engine and of its pools, and where it has CUDA, of the driver.
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>

#include "harness/leaks.h"

namespace maniple::harness {
namespace {

void warm_up_libtorch() {
  const at::Tensor weight = torch::ones({256, 256}, torch::requires_grad());
  torch::mm(weight, weight).sum().backward();
  // For tests on the CPU as well: autograd has a thread for each GPU, which starts the driver.
  if (torch::cuda::is_available()) {
    const at::Tensor on_gpu = torch::ones({256, 256}, torch::requires_grad().device(torch::kCUDA));
    torch::mm(on_gpu, on_gpu).sum().backward();
    torch::cuda::synchronize();
  }
  at::parallel_for(0, 1 << 20, 1, [](std::int64_t, std::int64_t) {});
}

// OpenMP's threads spin at the end of an operation unless they outnumber the cores. With a thread for each of 16 cores,
// 14 programs at a time spent 90 % of their time in that. Two threads are as many as the smallest test machine has
// cores.
[[maybe_unused]] const bool kFewThreads = (at::set_num_threads(std::min(at::get_num_threads(), 2)), true);

[[maybe_unused]] const bool kRegistered = call_before_first_count(warm_up_libtorch);

}  // namespace
}  // namespace maniple::harness
