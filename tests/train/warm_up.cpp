// What LibTorch starts when it is first used is there before threads and descriptors are counted: the threads of its autograd engine and
// of its pools, and where it has CUDA, those of the driver.
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include "harness/leaks.h"

namespace maniple::harness {
namespace {

void warm_up_libtorch() {
  const at::Tensor weight = torch::ones({256, 256}, torch::requires_grad());
  torch::mm(weight, weight).sum().backward();
  at::parallel_for(0, 1 << 20, 1, [](std::int64_t, std::int64_t) {});
}

[[maybe_unused]] const bool kRegistered = call_before_first_count(warm_up_libtorch);

}  // namespace
}  // namespace maniple::harness
