// The tensors of a module that matter to data-parallel training, and whether all ranks have the same.
#pragma once

#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/train/ddp.h>

namespace maniple {

struct NamedTensor {
  std::string name;
  torch::Tensor tensor;
};

struct ModuleTensors {
  std::vector<NamedTensor> trained;  ///< parameters that require a gradient
  std::vector<NamedTensor> frozen;   ///< those that do not
  std::vector<NamedTensor> buffers;
};

/// What messages begin with: "[DistributedDataParallel world rank 1/4] ".
std::string ddp_prefix(const ProcessGroup& group);

/// In the order of registration; a tensor that is registered twice appears once, under its first name.
ModuleTensors tensors_of(const torch::nn::Module& module);

/// Throws InvalidArgument, on all ranks alike, unless all ranks have the same options, parameters and buffers. The text
/// names the first difference and what each rank has. Collective.
void require_same_on_all_ranks(ProcessGroup& group, const DdpOptions& options, const ModuleTensors& tensors);

}  // namespace maniple
