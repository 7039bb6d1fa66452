// One step of an optimizer: collects the parameters that have a gradient, and batches those that can be stepped
// together.
//
//   Stepper stepper(masters, optimizer, "AdamW");      // throws for gradients that cannot be used, before anything is
//                                                      // changed
//   stepper.begin_group(StepKernel::adam, constants);  // for each parameter group
//   stepper.add(parameter, states, 2, step, own);      // for each of its parameters with a gradient
//   stepper.run();
//
// On the CPU a batch is one call of run_step. On other devices it is one of ATen's fused kernels if this LibTorch has
// it, otherwise ATen's operations on lists of tensors.
#pragma once

#include <array>
#include <charconv>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "train/optim/kernels.h"
#include <maniple/train/optim.h>

namespace maniple::optim {

/// The key of a parameter in an optimizer's table of states: the address of its TensorImpl, in LibTorch 1.13 as text.
template <class Map>
typename Map::key_type state_key(const Map&, const torch::Tensor& parameter) {
  if constexpr (std::is_same_v<typename Map::key_type, std::string>) {
    char text[2 + 2 * sizeof(void*)] = {'0', 'x'};
    const auto address = reinterpret_cast<std::uintptr_t>(parameter.unsafeGetTensorImpl());
    return {text, std::to_chars(text + 2, text + sizeof(text), address, 16).ptr};
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

class Stepper {
 public:
  Stepper(MasterWeights& masters, torch::optim::Optimizer& optimizer, const char* name);

  void begin_group(StepKernel kernel, const StepConstants& constants);

  /// Creates the first `state_count` states as zeros if they are undefined, and puts them in the order of the
  /// parameter's memory. Parameters with equal `step` must have equal `own` (see StepTensor).
  void add(const torch::Tensor& parameter, std::array<torch::Tensor*, 3> states, int state_count, std::int64_t step,
           std::array<double, 2> own);

  void run();

 private:
  /// Parameters that are stepped together: same group, device and dtype, and outside the CPU the same number of steps.
  struct Batch {
    StepKernel kernel = StepKernel::sgd;
    StepConstants constants;
    int group = 0;
    torch::Device device = torch::kCPU;
    torch::ScalarType dtype = torch::kFloat32;
    std::int64_t step = 0;
    std::array<double, 2> own = {};
    std::vector<StepTensor> tensors;                            // on the CPU
    std::vector<torch::Tensor> parameters, gradients, more[3];  // elsewhere
  };
  struct Copy {
    torch::Tensor from, to;
  };

  Batch& batch_of(const torch::Tensor& parameter, bool on_cpu, std::int64_t step, const std::array<double, 2>& own);
  static void run_list(Batch& batch);
  static bool run_fused(Batch& batch);

  MasterWeights& masters_;
  StepKernel kernel_ = StepKernel::sgd;
  StepConstants constants_;
  int group_ = -1;
  std::vector<Batch> batches_;
  std::vector<torch::Tensor> kept_;                       // temporary copies, kept until the step is done
  std::vector<torch::Tensor> masters_stepped_, rounded_;  // not on the CPU: sources and targets of rounding results
  std::vector<Copy> results_;  // parameters with gaps in memory, which are stepped as dense copies
  std::vector<torch::Tensor> changed_;
};

}  // namespace maniple::optim
